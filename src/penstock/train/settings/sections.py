"""The sections of a run's configuration: every key, its type, its default, its unit.

The text below a key is its meaning, for people: written run files, messages and the reference have it.
"""

from typing import Annotated, Literal

from pydantic import Field

from penstock.lowering import NOT_SHARDED, Sharding
from penstock.models.decoder_config import DecoderConfig, Positive
from penstock.planning import DEFAULT_MICROBATCHES
from penstock.train.settings.adapter_section import AdapterSection
from penstock.train.settings.data_section import DataSection
from penstock.train.settings.section import Checkpointing, NameOr, NotNegative, Scalar, Section, Sizes, Split


class RunSection(Section):
    """The run as a whole."""

    folder: str = Field(min_length=1)
    """folder for everything that the run writes"""
    seed: int = Field(default=0, ge=0, le=2**63 - 1)
    """seed of the initial parameters and of the order of the data"""
    steps: Positive = 500
    """optimizer steps"""
    device: str = Field(default="auto", min_length=1)
    """a kind of GPU that this torch is built for, such as 'cuda', one each; 'cpu'; 'auto': GPUs, if there are any"""
    skip_updates: bool = False
    """whether steps run but change no weight: a dry run of forwards and backwards"""
    deadline_s: float = Field(default=60.0, gt=0, le=1_000_000)
    """seconds after which a wait on another rank is given up"""
    evaluate_every: NotNegative = 100
    """optimizer steps between evaluations; 0: only after the last"""
    evaluate_batches: NotNegative = 16
    """held-out batches per evaluation; 0: never evaluate"""
    patience: NotNegative = 0
    """evaluations in a row without a lower held-out loss that end the run; 0: run.steps do"""
    record_step: NotNegative = 20
    """step, counted from 1, whose timeline is kept; the last one in a shorter run; 0: none is kept"""


class PipelineSection(Section):
    """How the model is spread over ranks, and the order of the work."""

    ranks: Positive = 2
    """ranks (processes) of the pipeline"""
    schedule: str = Field(default="1f1b", min_length=1)
    """name of a schedule, or a file with a schedule or program"""
    options: dict[str, Scalar] = Field(default_factory=dict)
    """options of the named schedule"""
    microbatches: Positive = DEFAULT_MICROBATCHES
    """microbatches per batch, in each replica"""
    microbatch_size: NotNegative = 0
    """sequences of a microbatch, in place of pipeline.microbatches, which then follows; 0: as many as that makes"""
    slices: NotNegative = 0
    """slices along the sequence per microbatch; 0: none, or as many as a schedule file has"""
    stages_per_rank: NotNegative = 0
    """stages that each rank holds; 0: as many as the schedule has by itself"""
    layers_per_stage: NotNegative = 0
    """layers of a stage, in the mean, in place of stages_per_rank; 0: as many as that number of stages makes"""
    split: Split = "declared"
    """'declared': even by the weights that layers declare; 'even': by their number; 'measured': by what they take; or a
    list of layers per stage"""
    memory_limit: int | str = ""
    """most that a rank may hold: '20GiB' or a number of bytes, which need pipeline.costs; '6 microbatches', or '12
    activations'; empty: any amount"""
    costs: str = ""
    """a file of costs, as penstock profile writes it, for a limit in bytes"""
    activation_checkpointing: Checkpointing = "none"
    """what blocks keep for the backward. 'none': everything; 'full': their inputs; 'selective': also the results of
    matrix products and attention; or a list with one of these per stage"""
    compile: bool | str = False
    """whether torch.compile compiles each layer: true takes Inductor where its compiler is found, else 'aot_eager',
    which makes no kernels; or one of these two by name"""
    run_ahead: NotNegative = 2
    """on GPUs, computations that may be queued and not ended; 0: the host waits for each message"""
    offload: Annotated[tuple[NotNegative, ...], Field(strict=False)] = ()
    """stages, as in [0, 1], whose activations wait in the memory of the host until shortly before their backward"""
    messages: Literal["posted", "coalesced", "rendezvous"] = "posted"
    """'posted': one by one; 'coalesced': in groups, over one communicator; 'rendezvous': sends wait for receives"""


class ParallelSection(Section):
    """How many replicas of the pipeline train as one job, and what they share out."""

    data: Positive = 1
    """replicas of the pipeline, each on its part of a batch; times pipeline.ranks processes"""
    shard: Literal["none", "optimizer", "full"] = "none"
    """what replicas share out. 'none': each holds all; 'optimizer': weights, gradients and optimizer state, gathered
    once a step; 'full': the same, and few stages of a rank are whole at once"""
    residency: NotNegative = 2
    """with 'full', stages of a rank that are whole at once, at most; 0: all"""
    look_ahead: NotNegative = 1
    """computations before its first use that a gather of weights starts; 0: right before it"""
    gradients: Literal["sum", "mean"] = "sum"
    """'mean': divides by the number of replicas behind the sum of gradients, so that fewer are too small for float16"""

    @property
    def sharding(self) -> Sharding:
        """The gathers and drops of a schedule; one replica shares out nothing."""
        return NOT_SHARDED if self.data == 1 else Sharding(self.shard, self.residency or None, self.look_ahead)


class ModelSection(Section, DecoderConfig):
    """The decoder's shape, or the function that makes another model."""

    source: str = ""
    """FILE.py:FUNCTION, which takes vocabulary, length and model.options and returns the layers of another model;
    empty: the decoder that the other keys describe"""
    options: dict[str, Scalar] = Field(default_factory=dict)
    """other arguments of model.source"""
    transformers: str = ""
    """folder of a causal language model of Hugging Face, with its tokenizer (extra `transformers`)"""
    verify: NameOr[Literal["auto"], bool] = "auto"
    """whether rank 0 compares model.transformers with its layers before step 1; 'auto': if it has memory for both"""
    loss: str = ""
    """FILE.py:FUNCTION of the last layer's output and the target; empty: cross entropy of next tokens"""
    source_digest: str = ""
    """of files that say what the model is; a run fills it in"""

    vocabulary: NotNegative = 0
    """number of token ids; 0: as many as the tokenizer has"""
    length: NotNegative = 0
    """longest sequence in tokens; 0: as long as batch.length"""

    @property
    def place(self) -> str:
        """Where another model than the decoder comes from; empty for the decoder."""
        return self.source or self.transformers

    @property
    def place_key(self) -> str:
        """The key that says so."""
        return "model.source" if self.source else "model.transformers"


class LossSection(Section):
    """How the loss of next tokens is computed."""

    chunk: NameOr[Literal["none", "auto"], Positive] = "none"
    """most positions whose logits are held at once; 'auto': as many as are as large as hidden states; 'none': all"""


class BatchSection(Section):
    """The batches of a step."""

    size: Positive = 16
    """sequences per batch"""
    length: Positive = 128
    """tokens per sequence"""
    accumulate: Positive = 1
    """batches whose gradients are added up before one optimizer step"""
    samples: NotNegative = 0
    """sequences per optimizer step, in place of batch.accumulate; a multiple of batch.size"""
    tokens: NotNegative = 0
    """tokens per optimizer step, in place of batch.accumulate; a multiple of size * length"""
    ramp_from: NotNegative = 0
    """batches that the first optimizer step adds up, with batch.ramp_steps; 0: no ramp-up"""
    ramp_steps: NotNegative = 0
    """optimizer steps over which the number of batches grows evenly from batch.ramp_from"""
    allow_ragged: bool = False
    """whether microbatches may differ in size, and slices in length"""


class PrecisionSection(Section):
    """The types that training computes in."""

    compute: Literal["model", "bfloat16", "float16"] = "model"
    """type of weights, activations and messages; 'model': model.dtype for all of it. Otherwise the optimizer steps
    float32 main weights, and gradients are added up in float32"""
    autocast: bool = False
    """whether weights stay as they are, and torch.autocast chooses what runs in precision.compute"""
    loss_scale: float = Field(default=65536.0, gt=0)
    """with 'float16', what the loss is multiplied by at first"""
    loss_scale_growth_steps: Positive = 2000
    """steps without an overflow after which the loss scale doubles; an overflow halves it"""
    not_finite: Literal["stop", "skip"] = "stop"
    """a loss or gradient that is infinite or not a number: 'stop' the run, or 'skip' the step; a gradient that
    overflows in 'float16' always skips"""
    most_skipped: Positive = 20
    """skipped steps in a row with which the run ends"""


class OptimizerSection(Section):
    """The optimizer, what it decays, and its learning rate over run.steps."""

    name: str = Field(default="AdamW", min_length=1)
    """class of torch.optim, such as AdamW, SGD or Adafactor"""
    options: dict[str, Scalar] = Field(default_factory=dict)
    """other arguments of that class, such as {momentum = 0.9}"""
    learning_rate: float = Field(default=1e-3, gt=0, le=1000)
    """largest learning rate"""
    warmup_steps: NotNegative = 20
    """optimizer steps until the largest learning rate"""
    learning_rate_schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """learning rate after the warm-up: 'cosine' or 'linear': down to the last one at run.steps; 'constant'; 'wsd':
    constant, then linearly down over decay_steps"""
    decay_steps: NotNegative = 0
    """with 'wsd', the last optimizer steps, in which the rate decays; 0: a tenth of run.steps"""
    minimum_fraction: float = Field(default=0.1, ge=0, le=1)
    """last learning rate, as a share of the largest; not with 'constant'"""
    weight_decay: float = Field(default=0.1, ge=0)
    """weight decay as the class has it; that of AdamW is decoupled from the gradient"""
    decay_vectors: bool = False
    """whether parameters of fewer than two dimensions decay: norms and biases"""
    decay_embeddings: bool = True
    """whether embeddings decay, and a head that is tied to one"""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """decay of the mean of the gradient"""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """decay of the mean of the squared gradient"""
    epsilon: float = Field(default=1e-8, gt=0)
    """added to the root of the mean squared gradient"""
    clip_norm: float = Field(default=1.0, ge=0)
    """largest gradient norm over all ranks; 0: no clipping"""


class MetricsSection(Section):
    """The numbers that are written of each step."""

    jsonl: bool = True
    """whether metrics.jsonl is written, one object a step"""
    tensorboard: bool = False
    """whether TensorBoard files are written (needs the extra `tensorboard`)"""
    wandb: Literal["off", "offline", "online"] = "off"
    """Weights & Biases (extra `wandb`): 'offline' writes files into the run folder, which `wandb sync` sends"""
    wandb_project: str = Field(default="penstock", min_length=1)
    """project of W&B"""
    every: NotNegative = 0
    """optimizer steps between two lines of output that stay; 0: in a terminal those of evaluated steps, else one every
    5 seconds too"""
    bubble_every: NotNegative = 0
    """optimizer steps between two that are measured for their bubble, which takes time; 0: only run.record_step is"""
    memory_every: NotNegative = 10
    """optimizer steps between two after which the ranks say how much memory they took at most; 0: none"""


class SampleSection(Section):
    """The text that the trained model writes at the end of the run."""

    prompt: str = ""
    """what the text begins with; empty: the run ends without one"""
    tokens: Positive = 200
    """most tokens that are added to the prompt"""
    temperature: float = Field(default=0.8, ge=0)
    """divides the logits before a token is drawn; 0: always the likeliest"""
    top_k: NotNegative = 0
    """of how many of the likeliest tokens one is drawn; 0: of all"""
    top_p: float = Field(default=1, gt=0, le=1)
    """one is drawn of the likeliest tokens whose probabilities together come to this; 1: of all"""


class CheckpointSection(Section):
    """The checkpoints that an interrupted run continues from."""

    every: NotNegative = 50
    """steps between checkpoints; one more at the end and at a signal; 0: none at all"""
    keep_last: Positive = 3
    """newest checkpoints that are kept"""
    keep_every: NotNegative = 0
    """checkpoints of steps that this number divides are kept, too; 0: no others"""
    asynchronous: bool = True
    """whether training goes on while a checkpoint is written"""
    load: str = ""
    """weights to begin with: a safetensors file, a folder of such with an index, a checkpoint, or a run folder; its
    optimizer and step are not taken"""


class ProfileSection(Section):
    """Steps that run under torch's profiler, which takes time and memory."""

    steps: Sizes = ()
    """first and last step of the window, counted from 1, as in [100, 105]; empty: none. Makes profile-rankN.json.gz"""
    memory: bool = False
    """whether these traces have allocations, too; on GPUs, also memory-rankN.json.gz, the allocator's blocks at last"""


class DebugSection(Section):
    """Checks and logs while the run goes on; all of them cost time, copies_every the least."""

    level: Literal["off", "messages", "values"] = "off"
    """'messages': each says what it is, and is compared; 'values': also, all are finite, copies equal"""
    ranges: bool = False
    """whether every instruction is a range in torch.profiler and NVTX"""
    log: Literal["off", "info", "debug"] = "off"
    """rankN.log in the run folder: 'info': plan and norms; 'debug': every message, too"""
    norms: Literal["off", "local", "all"] = "off"
    """norms of gradients, clipped, before an update and of weights after it, in debug.log: of each rank or of all"""
    copies_every: NotNegative = 100
    """optimizer steps between two comparisons of copies of parameters over ranks, tied or of replicas; 0: never"""
    one_stream: bool = False
    """whether all that a GPU runs of a step takes turns, to look for faults: the same numbers, and slower"""


class PlanSection(Section):
    """The prediction of `penstock plan`, which wrote the file; `penstock doctor` compares the run with it."""

    step_s: float = Field(default=0.0, ge=0)
    """seconds of a step; 0: nothing is predicted"""
    step_range_s: Annotated[tuple[float, ...], Field(strict=False)] = ()
    """the least and the most seconds that were expected"""
    peak_bytes: Annotated[tuple[NotNegative, ...], Field(strict=False)] = ()
    """the most bytes that each rank holds of tensors"""


class Sections(Section):
    """All sections of a run, before the rules between them are looked at."""

    run: RunSection
    pipeline: PipelineSection = PipelineSection()
    parallel: ParallelSection = ParallelSection()
    model: ModelSection = ModelSection()
    loss: LossSection = LossSection()
    adapter: AdapterSection = AdapterSection()
    data: DataSection = DataSection()
    batch: BatchSection = BatchSection()
    precision: PrecisionSection = PrecisionSection()
    optimizer: OptimizerSection = OptimizerSection()
    checkpoint: CheckpointSection = CheckpointSection()
    metrics: MetricsSection = MetricsSection()
    sample: SampleSection = SampleSection()
    profile: ProfileSection = ProfileSection()
    debug: DebugSection = DebugSection()
    plan: PlanSection = PlanSection()
