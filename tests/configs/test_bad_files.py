"""Files that cannot be used: the message names file, line and key, and nothing is executed."""

import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mok_megatron.configs import ConfigFileError, ModelConfig, load_cluster, load_model
from mok_megatron.resources import data_folder
from mok_megatron.typed_yaml import load_typed

MODEL = (data_folder("configs") / "models" / "tiny.yaml").read_text()
CLUSTER = (data_folder("configs") / "clusters" / "gb300_nvl72.yaml").read_text()


def line_of(text: str, part: str) -> int:
    return next(i for i, line in enumerate(text.splitlines(), 1) if part in line)


def edited(text: str, old: str, new: str) -> str:
    assert text.count(old) >= 1, old
    return text.replace(old, new, 1)


@pytest.mark.parametrize(
    ("old", "new", "key", "says"),
    [
        ("  num_experts: 8\n", "", "moe", "lacks the key 'num_experts'"),
        ("  num_experts: 8\n", "  num_expert: 8\n", "moe.num_expert", "did you mean 'num_experts'"),
        ("  num_experts: 8\n", "  num_experts: eight\n", "moe.num_experts", "needs a whole number, found 'eight'"),
        ("  num_experts: 8\n", "  num_experts: 8.5\n", "moe.num_experts", "needs a whole number"),
        ("  num_experts: 8\n", "  num_experts: true\n", "moe.num_experts", "needs a whole number"),
        ("  num_experts: 8\n", "  num_experts: [8]\n", "moe.num_experts", "found a list"),
        ("  num_experts: 8\n", "  num_experts:\n", "moe.num_experts", "needs a whole number"),
        ("  num_experts: 8\n", "  num_experts: 0\n", "moe.num_experts", "at least 1"),
        ("  num_experts: 8\n", "  num_experts: 8\n  num_experts: 8\n", "moe.num_experts", "stands twice"),
        ("  topk: 2\n", "  topk: 9\n", "moe.topk", "more than the 8 experts"),
        ("  first_dense_layers: 1\n", "  first_dense_layers: 4\n", "moe.first_dense_layers", "no MoE layer"),
        ("  kind: mla\n", "  kind: mlaa\n", "attention.kind", "did you mean 'mla'"),
        ("  v_head_dim: 32\n\n", "\n", "attention.v_head_dim", "is missing"),
        ("  attention: ", "  atention: ", "sources", "says nothing of 'attention'"),
    ],
)
def test_model_errors_have_file_line_and_key(tmp_path, old, new, key, says):
    text = edited(MODEL, old, new)
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(ConfigFileError) as caught:
        load_model(path)
    message = str(caught.value)
    found = re.match(rf"{re.escape(str(path))}, line (\d+): {re.escape(key)}: ", message)
    assert found, message
    assert says in message
    if new.strip() and key != "sources":
        assert int(found.group(1)) == line_of(text, new.strip().splitlines()[0]) + new.count("\n") - 1


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("  bf16_product: 0.69\n", "  bf16_product: 1.2\n", "share of the peak"),
        ("  bf16_product: 0.69\n", "  bf16_product: .nan\n", "finite"),
        ("  bandwidth: 900\n", "  bandwidth: -1\n", "above 0"),
        ("  gpus: 4\n", "  gpus: 0\n", "at least 1"),
        ('  compute_capability: "10.3"\n', "  compute_capability: 10.3\n", "needs text"),
    ],
)
def test_cluster_errors(tmp_path, old, new, says):
    path = tmp_path / "broken.yaml"
    path.write_text(edited(CLUSTER, old, new))
    with pytest.raises(ConfigFileError, match=says):
        load_cluster(path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is empty"),
        ("a: [1, 2\nb: 3\n", "line 2: does not parse as YAML"),
        ("a: b: c\n", "line 1: does not parse"),
        ("- 1\n", "needs keys with values, found a list"),
        ("title: &a x\nmoe: *a\n", "line 1: anchors and aliases"),
        ("title: x\nmoe: *a\n", "line 2: anchors and aliases"),
        ('title: "x\\e[2J"\n', "holds a control character"),
        ("---\ntitle: x\n---\ntitle: y\n", "does not parse"),
        ("a: \x01\n", "does not parse"),
        ("title: !!python/object/apply:os.system ['touch pwned']\n", "line 1: tags such as"),
        ("title: x\nmoe: !!python/name:os.system ''\n", "line 2: tags such as"),
        ("title: x\nmoe: !!bool maybe\n", "line 2: tags such as"),
    ],
)
def test_text_that_is_no_configuration(tmp_path, text, says, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigFileError, match=re.escape(says)) as caught:
        load_model(path)
    assert str(caught.value).count(str(path)) == 1
    assert not Path("pwned").exists()


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigFileError, match="cannot be read: No such file"):
        load_model(tmp_path / "none.yaml")
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigFileError, match="is not UTF-8"):
        load_model(binary)
    with pytest.raises(ConfigFileError, match="null"):
        load_model("a\0.yaml")
    os.mkfifo(tmp_path / "pipe.yaml")
    for path in (tmp_path / "pipe.yaml", Path("/dev/zero")):
        with pytest.raises(ConfigFileError, match="is not a regular file"):
            load_typed(path, ModelConfig)
    large = tmp_path / "large.yaml"
    large.write_text("# " + "x" * (1 << 20))
    with pytest.raises(ConfigFileError, match="larger than"):
        load_model(large)


def test_unknown_names_suggest_near_ones():
    with pytest.raises(ConfigFileError, match="did you mean 'deepseek_v3'"):
        load_model("deepseek-v3")
    with pytest.raises(ConfigFileError, match="did you mean 'gb300_nvl72'"):
        load_cluster("gb300")
    with pytest.raises(ConfigFileError, match="known: deepseek_v3, .*tiny"):
        load_model("zzz")


@given(st.data())
def test_any_damage_is_a_named_error_or_a_valid_file(tmp_path_factory, data):
    lines = MODEL.splitlines()
    index = data.draw(st.integers(0, len(lines) - 1))
    lines[index] = data.draw(
        st.one_of(
            st.just(""),
            st.text(max_size=20),
            st.text(alphabet="[]{}:&*!#|>-\"' \t0a", max_size=12).map(lambda t: lines[index] + t),
            st.integers(-5, 10**6).map(lambda n: lines[index].split(":")[0] + f": {n}"),
        )
    )
    path = tmp_path_factory.getbasetemp() / "damaged.yaml"
    path.write_text("\n".join(lines), encoding="utf-8")
    try:
        model = load_model(path)
    except ConfigFileError as error:
        assert str(path) in str(error)
    else:
        assert model.moe.topk <= model.moe.num_experts
