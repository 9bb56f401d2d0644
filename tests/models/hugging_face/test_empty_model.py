"""A folder's model is there without values, and a folder that is no model is one message."""

import builtins
import json

import pytest

from penstock.errors import ConfigError
from penstock.models.hugging_face.empty_model import empty_model
from tests.models.hugging_face.tiny_models import FAMILIES, saved_model

pytest.importorskip("transformers")


def refused(folder):
    with pytest.raises(ConfigError) as caught:
        empty_model(folder)
    return str(caught.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_has_the_names_and_shapes_and_no_values(tmp_path, family):
    saved = saved_model(family, tmp_path)
    for path in tmp_path.glob("*.safetensors"):
        path.unlink()

    found = empty_model(tmp_path)

    assert type(found) is type(saved.model)
    state = found.state_dict()
    assert {name: value.shape for name, value in state.items()} == {n: v.shape for n, v in saved.state.items()}
    assert {value.device.type for value in state.values()} == {"meta"}


def test_the_generation_config_is_that_of_the_folder(tmp_path):
    saved = saved_model("llama", tmp_path)
    saved.model.generation_config.max_new_tokens = 7
    saved.model.generation_config.save_pretrained(tmp_path)
    assert empty_model(tmp_path).generation_config.max_new_tokens == 7

    (tmp_path / "generation_config.json").unlink()
    assert empty_model(tmp_path).generation_config.max_new_tokens is None


def test_a_folder_that_is_no_model_is_told_what_was_expected(tmp_path):
    assert f"{tmp_path} holds no config.json; expected a folder that `save_pretrained`" in refused(tmp_path)
    assert "none: there is no such folder; expected" in refused(tmp_path / "none")


@pytest.mark.parametrize(
    "config", ["{", "{}", json.dumps({"model_type": "none"}), json.dumps({"model_type": "clip_vision_model"})]
)
def test_a_config_of_no_causal_language_model_is_refused(tmp_path, config):
    (tmp_path / "config.json").write_text(config)

    assert f"{tmp_path / 'config.json'}: transformers makes no causal language model of it" in refused(tmp_path)


def test_code_of_the_folder_is_not_run(tmp_path):
    saved_model("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")

    refused(tmp_path)

    assert not (tmp_path / "ran").exists()


def test_without_transformers_the_line_that_installs_it_is_told(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    imported = builtins.__import__

    def missing(name, *args):
        if name.partition(".")[0] == "transformers":
            raise ImportError(name)
        return imported(name, *args)

    monkeypatch.setattr(builtins, "__import__", missing)

    assert "needs the transformers package: pip install '.[transformers]' in Penstock's clone" in refused(tmp_path)
