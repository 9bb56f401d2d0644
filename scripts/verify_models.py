"""Verify small models, and end with status 1 where one is not as expected.

python scripts/verify_models.py                                 models of one's own, from files, and of transformers
python scripts/verify_models.py --refused pairs,translator      these may be refused; none may be wrong
python scripts/verify_models.py --only plain,llama --first      these alone, up to the first that is not as expected

With `scripts/mutants.py --under models/cutting --command`, it says which faults of the cut `ps.verify` finds: the last
line names the first model that shows one, the tensor that differs, and its module.
"""

import sys
import tempfile
from argparse import ArgumentParser
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from torch import nn  # noqa: E402

import penstock as ps  # noqa: E402
from penstock.verifying.report import VerifyReport  # noqa: E402
from penstock.verifying.verify import FAILED  # noqa: E402
from tests.support.verified_forms import FORM_CASES  # noqa: E402
from tests.support.verified_models import CASES as OWN_CASES  # noqa: E402
from tests.support.verified_models import Case  # noqa: E402
from tests.support.verified_values import VALUE_CASES  # noqa: E402

LLAMA = {"vocab_size": 11, "hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 12}
OPT = {
    **{"vocab_size": 11, "hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2, "ffn_dim": 12},
    **{"word_embed_proj_dim": 8, "dropout": 0.0, "max_position_embeddings": 16},
}
CASES = OWN_CASES | VALUE_CASES | FORM_CASES


def report_of_case(case: Case) -> VerifyReport:
    """Verify a model of one's own."""
    return ps.verify(case.model(), case.points, *case.batches())


def report_from_file(case: Case) -> VerifyReport:
    """Verify a model whose layers have their values from a file."""
    model = case.model()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.safetensors")
        save_file({name: tensor.clone() for name, tensor in model.state_dict().items()}, path)
        return ps.verify(model, ps.cut(_bare(case), case.points, weights=path), *case.batches())


def report_without_values() -> VerifyReport:
    """Verify a model on the meta device, which has no values; it is refused."""
    case = CASES["plain"]
    return ps.verify(case.model(), ps.cut(_bare(case), case.points), *case.batches())


def report_without_points() -> VerifyReport:
    """Verify a model that is cut nowhere; it is refused."""
    case = CASES["plain"]
    model = case.model()
    return ps.verify(model, ps.cut(model, []), *case.batches())


def report_of_many_arguments() -> VerifyReport:
    """Verify a model whose batches have arguments without names; it is refused."""
    case = CASES["outer"]
    tokens = case.batches()[0]["tokens"]
    return ps.verify(case.model(), case.points, (tokens, 2.0, tokens))


def _bare(case: Case) -> nn.Module:
    with torch.device("meta"):
        bare: nn.Module = case.make().double()
    return bare


def report_of_llama() -> VerifyReport:
    """Verify a model of transformers from its folder, with a padded batch and others without a mask."""
    library = import_module("transformers")
    tokens = torch.randint(11, (4, 6), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    mask[1:, :2] = 0
    batches = [{"input_ids": each, "target": each} for each in (tokens, tokens[:, 2:])]
    batches.append({"input_ids": tokens, "attention_mask": mask, "target": tokens})
    with torch.random.fork_rng(devices=[]), tempfile.TemporaryDirectory() as folder:
        model = library.LlamaForCausalLM(library.LlamaConfig(**LLAMA))
        model.save_pretrained(folder)
        return ps.verify(model, ps.from_transformers(folder), *batches)


def report_of_opt() -> VerifyReport:
    """Verify a model of transformers that defines its last norm before its blocks."""
    library = import_module("transformers")
    tokens = torch.randint(11, (4, 6), generator=torch.Generator().manual_seed(0))
    with torch.random.fork_rng(devices=[]):
        model = library.OPTForCausalLM(library.OPTConfig(**OPT))
        return ps.verify(model, ps.from_transformers(model), {"input_ids": tokens, "target": tokens})


REFUSED = {
    "without_values": report_without_values,
    "without_points": report_without_points,
    "many_arguments": report_of_many_arguments,
}


def all_reports() -> dict[str, Callable[[], VerifyReport]]:
    """Return what verifies each model, by name."""
    reports: dict[str, Callable[[], VerifyReport]] = {
        name: lambda case=case: report_of_case(case) for name, case in CASES.items()
    }
    reports["plain_from_file"] = lambda: report_from_file(CASES["plain"])
    reports["tied_from_file"] = lambda: report_from_file(CASES["tied"])
    reports["turning_from_file"] = lambda: report_from_file(CASES["turning"])
    reports |= REFUSED
    if find_spec("transformers") is not None:
        reports |= {"llama": report_of_llama, "opt": report_of_opt}
    return reports


def verdict_of(make_report: Callable[[], VerifyReport]) -> tuple[str, str]:
    """Return whether a model is right, wrong or refused, and the words of the report."""
    try:
        report = make_report()
    except ps.PenstockError as error:
        return "refused", str(error).partition("\n")[0]
    except Exception as error:  # a mutant may fail anywhere
        return "failed", f"{type(error).__name__}: {error}"
    if report.is_right:
        return "right", ""
    if not report.refusal:
        return "wrong", str(report.differences[0])
    return "failed" if report.refusal.startswith(FAILED) else "refused", report.refusal.partition("\n")[0]


def main() -> int:
    """Verify all models; return the exit status."""
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--refused", default="", help="names of models that may be refused, with commas between them")
    parser.add_argument("--only", default="", help="names of the models to verify, with commas between them")
    parser.add_argument("--first", action="store_true", help="end at the first model that is not as expected")
    arguments = parser.parse_args()
    may_be_refused = {name for name in CASES if CASES[name].may_be_refused}
    may_be_refused |= {*arguments.refused.split(","), *REFUSED}
    faults = []
    for name, make_report in all_reports().items():
        if arguments.only and name not in arguments.only.split(","):
            continue
        verdict, words = verdict_of(make_report)
        line = f"{name}: {verdict}{f': {words}' if words else ''}"
        print(line, flush=True)
        if verdict in ("wrong", "failed") or (verdict == "refused" and name not in may_be_refused):
            faults.append(line)
            if arguments.first:
                break
    if faults:
        print(f"{len(faults)} models; {faults[0]}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
