"""Rules between the keys of a configuration, which no single field can know."""

from collections.abc import Iterator
from pathlib import Path

from penstock.errors import MAX_KEY_CHARACTERS, MAX_SHOWN, ConfigError, cut, nearest, shortened
from penstock.models.decoder_config import DecoderConfig
from penstock.train.settings.adapter_section import AdapterSection
from penstock.train.settings.data_section import CORPORA, SourceKeys
from penstock.train.settings.sections import ModelSection, Sections
from penstock.train.settings.steps import decay_steps_of

MOST_BATCHES = 100_000
"""The most batches in one optimizer step; of more, the first step would not end."""
MOST_TRIED = 1024
"""The most numbers of microbatches that are tried for a hint."""
COMPILERS = ("inductor", "aot_eager")
"""The backends of torch.compile whose backwards can be split."""


Problem = tuple[str, str]
"""A setting that cannot be used: its dotted key, and what is wrong with it."""


def config_error(problems: list[Problem]) -> ConfigError:
    """Return one error that lists every problem; its `key` is set where there is only one."""
    if len(problems) == 1:
        [(key, text)] = problems
        return ConfigError(text, key=key)
    lines = [f"  {cut(key, MAX_KEY_CHARACTERS)}: {text}" for key, text in problems[:MAX_SHOWN]]
    more = [f"  ... {len(problems)} settings in all"] if len(problems) > MAX_SHOWN else []
    return ConfigError("\n".join([f"{len(problems)} settings cannot be used:", *lines, *more]))


def problems_of(config: Sections) -> list[Problem]:
    """Return all contradictions between settings."""
    return [problem for rule in _RULES for problem in rule(config)]


def _batch_problems(config: Sections) -> Iterator[Problem]:
    """Yield the problem of a batch that the microbatches of all replicas do not divide, and the nearest numbers."""
    if config.pipeline.microbatch_size:
        return
    batch, replicas = config.batch, config.parallel.data
    size, count = batch.size, config.pipeline.microbatches
    most = count * replicas  # microbatches of all replicas
    if size >= most and (size % most == 0 or batch.allow_ragged):
        return
    replica_note = f" in each of parallel.data = {replicas} replicas" if replicas > 1 else ""
    requirement = f"pipeline.microbatches = {count}{replica_note}"
    if size < most:
        fewer = size // replicas if batch.allow_ragged or size % replicas == 0 else 0
        larger = f"batch.size = {most}"
        fix = f"set pipeline.microbatches = {fewer}, or {larger}" if fewer else f"set {larger}"
        problem = f"{size} sequences cannot fill {requirement}; use at least one sequence per microbatch: {fix}"
    else:
        smaller = size - size % most
        fewer = max((few for few in range(1, min(count, MOST_TRIED)) if size % (few * replicas) == 0), default=0)
        fix = f"use {smaller} or {smaller + most}, or set batch.allow_ragged = true"
        fix += f", or pipeline.microbatches = {fewer}" if fewer else ""
        problem = f"{size} is not a multiple of {requirement}; {fix}"
    yield "batch.size", problem


def _microbatch_size_problems(config: Sections) -> Iterator[Problem]:
    """Yield the problem of a size that does not divide the sequences of a replica, and the sizes that do."""
    size, num_sequences, replicas = config.pipeline.microbatch_size, config.batch.size, config.parallel.data
    if not size:
        return
    if "microbatches" in config.pipeline.model_fields_set:
        problem = "beside pipeline.microbatches, which follows from it; drop one of the two"
        yield "pipeline.microbatch_size", problem
    elif num_sequences % replicas:
        above = num_sequences - num_sequences % replicas + replicas
        nearest_sizes = f"{above - replicas} or {above}" if above > replicas else f"{above}"
        yield (
            "batch.size",
            f"{num_sequences} is not a multiple of parallel.data = {replicas}, so that replicas cannot all have "
            f"microbatches of pipeline.microbatch_size = {size}; use {nearest_sizes}",
        )
    elif num_sequences // replicas % size:
        num_rows = num_sequences // replicas
        replica_note = f" of each of parallel.data = {replicas} replicas" if replicas > 1 else ""
        yield (
            "pipeline.microbatch_size",
            f"{size} does not divide the {num_rows} sequences of a batch{replica_note}; use {_said_divisors(num_rows)}",
        )


def _said_divisors(number: int) -> str:
    """Say which numbers divide a number: the first of them."""
    divisors = [divisor for divisor in range(1, min(number, MOST_TRIED) + 1) if number % divisor == 0][:MAX_SHOWN]
    return f"one of {', '.join(map(str, divisors))}{', ...' if divisors[-1] < number else ''}"


def _ramp_problems(config: Sections) -> Iterator[Problem]:
    """Yield what is wrong with the number of batches in an optimizer step: key and text.

    One of batch.accumulate, samples and tokens says how large a step is in the end. With a ramp-up, it grows to that
    from batch.ramp_from batches within batch.ramp_steps steps.
    """
    batch, tokens = config.batch, config.batch.size * config.batch.length
    is_set_by_key = {"accumulate": batch.accumulate > 1, "samples": batch.samples > 0, "tokens": batch.tokens > 0}
    keys_set = [name for name, is_set in is_set_by_key.items() if is_set]
    if len(keys_set) > 1:
        yield f"batch.{keys_set[1]}", f"batch.{keys_set[0]} says already how large an optimizer step is; drop one"
        return
    for name, value, unit in (("samples", batch.samples, batch.size), ("tokens", batch.tokens, tokens)):
        if value % unit:
            size = "batch.size" if name == "samples" else "batch.size * batch.length"
            multiple_below = value - value % unit
            hint = f"{multiple_below} or {multiple_below + unit}" if multiple_below else str(unit)
            yield f"batch.{name}", f"{value} is not a multiple of {size} = {unit}; use {hint}"
            return
    num_batches = max(batch.accumulate, batch.samples // batch.size, batch.tokens // tokens)
    if num_batches > MOST_BATCHES:
        name = keys_set[0]
        unit = {"accumulate": 1, "samples": batch.size, "tokens": tokens}[name]
        problem = f"{num_batches} batches in one optimizer step take too long; use at most {MOST_BATCHES * unit}"
        yield f"batch.{name}", problem
        return
    if bool(batch.ramp_from) != bool(batch.ramp_steps):
        key, missing_key = ("ramp_from", "ramp_steps") if batch.ramp_from else ("ramp_steps", "ramp_from")
        yield f"batch.{key}", f"a ramp-up needs batch.{missing_key} too; set both, or neither"
    elif batch.ramp_from > num_batches:
        yield "batch.ramp_from", f"{batch.ramp_from} batches are more than the {num_batches} that it grows to"


def _precision_problems(config: Sections) -> Iterator[Problem]:
    precision, model = config.precision, config.model
    if precision.compute == "model":
        if precision.autocast:
            yield "precision.autocast", "true needs the type to compute in; set precision.compute = 'bfloat16'"
    elif model.dtype != "float32":
        yield (
            "precision.compute",
            f"{precision.compute!r} beside model.dtype = {model.dtype!r}; leave model.dtype at 'float32', the type of "
            "the main weights, or set precision.compute = 'model'",
        )


def _optimizer_problems(config: Sections) -> Iterator[Problem]:
    optimizer, run = config.optimizer, config.run
    if optimizer.learning_rate_schedule != "wsd":
        if optimizer.decay_steps:
            yield (
                "optimizer.decay_steps",
                f"only 'wsd' has them, but optimizer.learning_rate_schedule = {optimizer.learning_rate_schedule!r}",
            )
        return
    decaying = decay_steps_of(optimizer, run.steps)
    if optimizer.warmup_steps + decaying > run.steps:
        yield (
            "optimizer.decay_steps",
            f"{optimizer.warmup_steps} steps of warm-up and {decaying} of decay do not fit into run.steps = "
            f"{run.steps}; lower optimizer.warmup_steps or optimizer.decay_steps",
        )


def _profile_problems(config: Sections) -> Iterator[Problem]:
    profile, run = config.profile, config.run
    if not profile.steps:
        if profile.memory:
            yield "profile.memory", "true needs the steps to look at; set profile.steps = [FIRST, LAST]"
        return
    if len(profile.steps) != 2 or profile.steps[0] > profile.steps[1]:
        yield "profile.steps", f"{list(profile.steps)}; give the first and the last step, as in [100, 105]"
    elif profile.steps[1] > run.steps:
        yield "profile.steps", f"{list(profile.steps)} goes beyond run.steps = {run.steps}; end it earlier"


def _debug_problems(config: Sections) -> Iterator[Problem]:
    debug = config.debug
    if debug.norms != "off" and debug.log == "off":
        yield "debug.norms", f"{debug.norms!r} is written nowhere; set debug.log = 'info' too"
    if debug.one_stream and (debug.level != "off" or config.pipeline.messages == "rendezvous"):
        other = f"debug.level = {debug.level!r}" if debug.level != "off" else "pipeline.messages = 'rendezvous'"
        yield "debug.one_stream", f"true lets messages go in groups, but {other} needs them one by one; drop one"


def _pipeline_problems(config: Sections) -> Iterator[Problem]:
    pipeline = config.pipeline
    if pipeline.split == ():
        yield "pipeline.split", "the list is empty; give the layers of each stage, or drop the key"
    if isinstance(pipeline.compile, str) and pipeline.compile not in COMPILERS:
        problem = f"no such backend: {shortened(pipeline.compile)}.{nearest(pipeline.compile, COMPILERS)}"
        yield "pipeline.compile", f"{problem} Use true, false, {' or '.join(map(repr, COMPILERS))}"
    if pipeline.layers_per_stage and (pipeline.stages_per_rank or not isinstance(pipeline.split, str)):
        other = "stages_per_rank" if pipeline.stages_per_rank else "split"
        yield "pipeline.layers_per_stage", f"beside pipeline.{other}, which says the number of stages too; drop one"
    if config.loss.chunk != "none" and config.model.loss:
        yield "loss.chunk", "is for the loss of next tokens, but model.loss is a function of yours; drop one of the two"
    if pipeline.messages != "posted" and config.debug.level != "off":
        problem = f"{pipeline.messages!r} beside debug.level = {config.debug.level!r}, which sends a header with each"
        yield "pipeline.messages", f"{problem} message, one by one; change one of the two"


def _decoder_problems(model: ModelSection) -> Iterator[Problem]:
    yield from model.problems("model.")
    for key in ("options", "loss", "source_digest"):
        if getattr(model, key):
            yield f"model.{key}", "is for a model of your own; name its function in model.source, or drop it"


def _source_of_model_problems(model: ModelSection) -> Iterator[Problem]:
    """Yield the decoder's keys that are set although model.source, for which they say nothing, is another model."""
    for key, field in DecoderConfig.model_fields.items():
        if key not in ("vocabulary", "length") and getattr(model, key) != field.default:
            yield f"model.{key}", f"is of the decoder; give {key} to model.source, in model.options"
    for key in ("vocabulary", "length"):
        if key in model.options:
            yield f"model.options.{key}", f"model.source gets it already; set model.{key} to change it"


def _transformers_problems(model: ModelSection) -> Iterator[Problem]:
    """Yield the decoder's keys that are set although the config of the transformers folder says the same."""
    for key, field in ModelSection.model_fields.items():
        is_own = key in ("transformers", "source_digest", "dtype", "length", "verify")
        if not is_own and getattr(model, key) != field.get_default(call_default_factory=True):
            yield f"model.{key}", "is not for a model of transformers, whose config.json says it all; drop it"


def _model_problems(config: Sections) -> Iterator[Problem]:
    model, batch = config.model, config.batch
    if model.transformers:
        yield from _transformers_problems(model)
    else:
        yield from _source_of_model_problems(model) if model.source else _decoder_problems(model)
        if model.verify is True:
            yield "model.verify", "is for a model that is cut; name one in model.transformers, or drop it"
    if 0 < model.length < batch.length:
        yield "batch.length", f"{batch.length} tokens are more than model.length = {model.length}"


def _adapter_problems(config: Sections) -> Iterator[Problem]:
    """Yield the keys of an adapter that are set although the method does not have them, or there is no adapter."""
    adapter = config.adapter
    keys = [key for key, value in adapter if value != getattr(AdapterSection(), key)]
    if adapter.folder:
        unused, reason = {*keys} - {"folder"}, "is set by the settings of the adapter in adapter.folder"
    elif adapter.kind == "none":
        unused, reason = {*keys}, "is of an adapter; set adapter.kind"
    else:
        absent = {"lora": (), "vera": ("alpha",), "ia3": ("alpha", "rank", "dropout")}[adapter.kind]
        unused, reason = {*keys} & {*absent}, f"is not for adapter.kind = {adapter.kind!r}"
    for key in sorted(unused):
        yield f"adapter.{key}", f"{reason}; drop it"
    if adapter.is_used and not config.model.transformers:
        yield "adapter.kind", "an adapter is put into a model of Hugging Face; name one in model.transformers"


def _source_problems(config: Sections) -> Iterator[Problem]:
    """Yield the problems of data.files and its neighbours, or of each of data.sources, which replace them."""
    data = config.data
    direct_keys = SourceKeys(**{name: getattr(data, name) for name in SourceKeys.model_fields})
    if data.source:
        if data.sources or direct_keys != SourceKeys():
            yield "data.source", "data.files or data.sources are set too; keep one of them"
        if data.packing != "windows":
            yield "data.packing", f"{data.packing!r} is for text; a source of your own packs by itself"
        return
    if data.sources and direct_keys != SourceKeys():
        yield "data.sources", "data.files or its neighbours are set too; move them into a source of their own"
        return
    sources: dict[str, SourceKeys] = {f"data.sources[{index}]": keys for index, keys in enumerate(data.sources)}
    for key, source in (sources or {"data": direct_keys}).items():
        yield from _files_problems(key, source)
        if not source.kind.column and source.column != "text":
            with_columns = " or ".join(repr(name) for name, kind in CORPORA.items() if kind.column)
            yield f"{key}.column", f"only {key}.corpus = {with_columns} has columns; drop it"
        if source.learn not in ("all", source.kind.learn):
            yield f"{key}.learn", f"only {key}.corpus = 'chats' knows who speaks; use 'all', or drop it"
        if not source.suffixes:
            yield f"{key}.suffixes", "the list is empty; name at least one ending, as in ['.txt']"


def _files_problems(key: str, source: SourceKeys) -> Iterator[Problem]:
    """Yield the problem of a source whose files are too few or too many for its corpus."""
    most_files, corpus = source.kind.most_files, f"{key}.corpus = {source.corpus!r}"
    if most_files == 0 and source.files:
        yield f"{key}.files", f"files are named although {corpus}; drop one of the two"
    elif most_files == 1 and len(source.files) != 1:
        yield f"{key}.files", f"{corpus} needs one folder; name more in data.sources"
    elif most_files is None and not source.files:
        other = f", or set {key}.corpus = 'stdlib'" if source.corpus == "files" else ""
        yield f"{key}.files", f"no file or folder is named; name some{other}"


def _chats_problems(config: Sections) -> Iterator[Problem]:
    """Yield what conversations need and is not set, or is set without them."""
    data = config.data
    if not data.has_chats:
        if data.chat_template:
            yield "data.chat_template", "is for data.corpus = 'chats'; drop it, or name chats"
        return
    if data.packs.cuts:
        yield "data.packing", f"{data.packing!r} cuts conversations; use 'whole', or 'none' for one in a sequence"
    if data.tokenizer == "bytes" and not _lacks_tokenizer(config):
        yield "data.tokenizer", "bytes have no chat template; name the tokenizer.json of a model that chats"


def _data_problems(config: Sections) -> Iterator[Problem]:
    """Yield what is wrong with the settings of data, evaluation and tokenizer: key and text."""
    data, model, run = config.data, config.model, config.run
    if model.source and data.packs.separates:
        yield "data.packing", f"{data.packing!r} is for the decoder, which takes positions; use 'windows' or 'none'"
    if run.patience and not (run.evaluate_batches and run.evaluate_every):
        yield "run.patience", "needs evaluations; set run.evaluate_every and run.evaluate_batches"
    if data.tokenizer == "bytes" and not data.source and 0 < model.vocabulary < 256:
        yield "model.vocabulary", f"{model.vocabulary} is too small for bytes; use 0, or 256 and more"
    if _lacks_tokenizer(config):
        folder = model.transformers
        yield (
            "data.tokenizer",
            f"{folder} has no tokenizer.json, by which text becomes the ids of its model. Save its tokenizer there "
            f"(AutoTokenizer.from_pretrained({folder!r}).save_pretrained({folder!r})), name a tokenizers JSON file, or "
            "'bytes' if the model is one of bytes",
        )
    if data.tokenizer == "bytes" and data.tokenizer_digest:
        yield "data.tokenizer_digest", "bytes have no tokenizer file; leave it empty, or name the file"
    if data.tokenizer == "bytes" and data.end_of_document:
        yield "data.end_of_document", "bytes have no named tokens; leave it empty, or name a tokenizer file"
    if run.evaluate_batches and data.held_out_fraction == 0:
        yield (
            "data.held_out_fraction",
            "0 leaves nothing to evaluate on; use more than 0, or set run.evaluate_batches = 0",
        )


def _lacks_tokenizer(config: Sections) -> bool:
    """Whether text would be bytes only because the folder of the model has no tokenizer that can be read."""
    data, folder = config.data, Path(config.model.transformers)
    if not config.model.transformers or "tokenizer" in data.model_fields_set or data.source:
        return False
    has_text = any(source.corpus != "datasets" or source.column == "text" for source in data.all_sources)
    return has_text and folder.is_dir() and not (folder / "tokenizer.json").is_file()


_RULES = (
    _batch_problems,
    _microbatch_size_problems,
    _ramp_problems,
    _pipeline_problems,
    _model_problems,
    _adapter_problems,
    _source_problems,
    _chats_problems,
    _data_problems,
    _precision_problems,
    _optimizer_problems,
    _profile_problems,
    _debug_problems,
)
"""All rules, in the order in which their problems are listed."""
