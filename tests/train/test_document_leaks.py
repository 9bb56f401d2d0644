"""Packed documents that see each other: the model is refused before the first step, and others are not."""

import pytest
import torch

from penstock.errors import ConfigError, PenstockError
from penstock.pipeline import Pipeline
from penstock.train.document_leaks import require_separate_documents
from penstock.train.model_source import build_layers, loss_of
from penstock.train.settings.config import config_from_table
from tests.hugging_face.tiny_models import config_of
from tests.support.local_pipelines import error_of, on_ranks
from tests.train.tiny_runs import tiny_table, trained

transformers = pytest.importorskip("transformers")

SHAPE = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
FAMILIES = {
    "llama": lambda: config_of("llama", vocab_size=300),
    "mixtral": lambda: config_of("mixtral", vocab_size=300),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **SHAPE, **EXPERTS, num_key_value_heads=2, intermediate_size=32, layer_types=["full_attention"] * 2
    ),
    "bamba": lambda: transformers.BambaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        mamba_n_heads=8,
        mamba_d_head=8,
        mamba_d_state=8,
        mamba_n_groups=1,
        attn_layer_indices=[1],
    ),
}


@pytest.fixture
def table(tmp_path):
    """Settings of a run whose model is that of a family, in a type."""

    def make(family, dtype=torch.float32, **sections):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(FAMILIES[family]())
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0, 0.1)
        model.to(dtype).save_pretrained(tmp_path / family)
        text = tmp_path / "text.txt"
        text.write_text("it is a pipeline, and a pipeline is a row of stages. " * 40)
        settings = {"data": {"packing": "documents"}, "batch": {"size": 4, "length": 24}} | sections
        whole = tiny_table(tmp_path / "run", text, **settings)
        whole["data"]["tokenizer"] = "bytes"
        return whole | {"model": {"transformers": str(tmp_path / family)}}

    return make


def required(table, num_ranks):
    """Return the error of each rank, or None where the model is not refused."""
    config = config_from_table(table)

    def case(transport):
        with Pipeline(build_layers(config, 300), "1f1b", 2, loss_of(config, 300), transport=transport) as pipeline:
            try:
                require_separate_documents(config, pipeline, 300)
            except PenstockError as error:
                return error
        return None

    return on_ranks(num_ranks, case)


@pytest.mark.parametrize("family", ["gpt_oss", pytest.param("bamba", marks=pytest.mark.slow)])
def test_a_model_whose_documents_see_each_other_is_refused_by_name_on_every_rank(table, family):
    for ranks in (1, 2):
        errors = required(table(family), ranks)

        for error in errors:
            assert "data.packing" in str(error)
            assert family.replace("_", "") in str(error).replace("_", "").lower()
            assert "Use 'none'" in str(error)
        assert isinstance(errors[-1], ConfigError)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("llama", torch.float32),
        ("mixtral", torch.float32),
        pytest.param("llama", torch.bfloat16, marks=pytest.mark.slow),
        pytest.param("mixtral", torch.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_a_model_that_keeps_documents_apart_is_not(table, family, dtype):
    assert required(table(family, dtype), 2) == [None, None]


def test_another_packing_is_not_looked_at(table):
    assert required(table("gpt_oss", data={"packing": "windows"}), 1) == [None]


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, "aot_eager"])
def test_a_run_is_refused_before_its_first_step(table, tmp_path, compiled):
    pipeline = {"ranks": 1, "microbatches": 2, "compile": compiled}
    error = error_of(trained, table("gpt_oss", pipeline=pipeline))

    assert isinstance(error, ConfigError)
    assert error.key == "data.packing"
    assert not (tmp_path / "run" / "weights.safetensors").exists()
    _, printed = trained(table("llama", pipeline=pipeline, run={"folder": str(tmp_path / "other"), "steps": 1}))
    assert "step 1/1" in printed
