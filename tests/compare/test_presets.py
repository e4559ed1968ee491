"""The presets' models and plans, the flags made of them, and refusals."""

import pytest

from mok_megatron.compare import flags, presets
from mok_megatron.compare.dispatchers import DISPATCHERS, dispatcher_flags, missing
from mok_megatron.configs import load_cluster, load_model
from mok_megatron.errors import MokConfigError


def words_of(capsys, *arguments: str) -> list[str]:
    assert flags.main(["--dry-run", *arguments]) == 0
    return capsys.readouterr().out.split("\0")[:-1]


def refusal_of(capsys, *arguments: str) -> str:
    assert flags.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def value(words: list[str], flag: str) -> str:
    assert words.count(flag) == 1
    return words[words.index(flag) + 1]


def test_full_is_the_model_of_the_yaml(capsys):
    words = words_of(capsys, "--preset", "full")
    model = load_model("deepseek_v3").megatron_arguments()
    assert words[: len(model)] == model
    assert value(words, "--expert-model-parallel-size") == "64"
    assert "--pipeline-model-parallel-layout" in words


def test_full_grows_with_the_gpus():
    sizes = [
        presets.make_preset_plan(presets.PRESETS["full"], load_cluster("gb300_nvl72"), n).sizes for n in (128, 512)
    ]
    assert [size.ep for size in sizes] == [64, 64]
    assert sizes[1].dp * sizes[1].pp == 4 * sizes[0].dp * sizes[0].pp == 512


def test_proxy_has_the_described_shape(capsys):
    words = words_of(capsys, "--preset", "proxy-2gpu")
    for flag, expected in {
        "--num-layers": "4",
        "--moe-layer-freq": "([0]*1+[1]*3)",
        "--hidden-size": "7168",
        "--num-experts": "16",
        "--moe-router-topk": "8",
        "--moe-shared-expert-intermediate-size": "2048",
        "--seq-length": "4096",
        "--micro-batch-size": "1",
        "--global-batch-size": "8",
        "--expert-model-parallel-size": "2",
        "--vocab-size": "8192",
    }.items():
        assert value(words, flag) == expected
    assert {"--multi-latent-attention", "--bf16", "--use-distributed-optimizer", "--mock-data"} <= set(words)
    # Groups would leave exactly top-k experts to choose from; there is no MTP layer.
    assert not {"--moe-router-num-groups", "--moe-router-group-topk", "--mtp-num-layers"} & set(words)


def test_proxy_of_one_gpu_is_that_of_two_with_all_experts_on_it(capsys):
    one, two = (words_of(capsys, "--preset", preset) for preset in ("proxy-1gpu", "proxy-2gpu"))
    sizes = {"--expert-model-parallel-size": ("1", "2"), "--global-batch-size": ("2", "8")}
    assert {flag: (value(one, flag), value(two, flag)) for flag in sizes} == sizes
    assert {a for a, b in zip(one, two, strict=True) if a != b} == {"1", "2"}


def test_proxy_of_8_keeps_groups_and_mtp(capsys):
    words = words_of(capsys, "--preset", "proxy-8gpu")
    assert value(words, "--moe-router-num-groups") == "8" and value(words, "--mtp-num-layers") == "1"


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_dispatchers_differ_in_nothing_but_their_flags(capsys, dispatcher):
    def rest(name: str) -> list[str]:
        words = words_of(capsys, "--preset", "proxy-2gpu", "--dispatcher", name)
        own = {"--moe-token-dispatcher-type", *dispatcher_flags(name, grouped=True)}
        pairs = zip(words, [*words[1:], ""], strict=True)
        kept = [pair for pair in pairs if pair[0] not in own and not pair[0].startswith("--mok-")]
        return [word for word, _ in kept if word.startswith("--")]

    assert rest(dispatcher) == rest("mok")
    words = words_of(capsys, "--preset", "proxy-2gpu", "--dispatcher", dispatcher)
    flex = dispatcher in ("hybridep", "deepep")
    assert value(words, "--moe-token-dispatcher-type") == ("flex" if flex else dispatcher)
    assert flex == ("--moe-flex-dispatcher-backend" in words)


def test_users_data_and_tokenizer_replace_the_presets(capsys, tmp_path):
    for end in (".bin", ".idx"):
        (tmp_path / f"text{end}").touch()
    user = ["--data-path", "0.3", f"{tmp_path}/text", "--tokenizer-type", "HuggingFaceTokenizer"]
    words = words_of(capsys, "--preset", "tiny", "--", *user)
    assert not {"--mock-data", "--tokenizer-type", "--vocab-size"} & set(words)


def test_users_sizes_go_into_the_plan(capsys):
    words = words_of(
        capsys, "--cluster", "hgx_h200_8gpu", "--gpus", "1024", "--", "--expert-model-parallel-size", "8",
        "--pipeline-model-parallel-size", "16",
    )  # fmt: skip
    assert value(words, "--expert-model-parallel-size") == "8"
    assert value(words, "--pipeline-model-parallel-size") == "16"


def test_a_batch_schedule_replaces_the_global_batch(capsys):
    assert "--global-batch-size" not in words_of(capsys, "--batch-schedule", "0:3072 469B:15360")
    text = refusal_of(capsys, "--dry-run", "--gpus", "4096", "--batch-schedule", "0:3072 469B:15360")
    assert "3072, 15360" in text and "--global-batch-size" in text


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("--preset", "ful"), ("'ful' is unknown", "proxy-2gpu")),
        (("--preset", "proxy-2gpu", "--gpus", "1"), ("runs on 2 GPUs, and 1 were found",)),
        (("--preset", "proxy-1gpu", "--gpus", "2"), ("runs on 1 GPU, and 2 were found", "proxy-2gpu")),
        (("--preset", "tiny", "--gpus", "3"), ("2 CPU processes",)),
        (("--cluster", "hgx_h200_8gpu"), ("--expert-model-parallel-size 64 does not fit", "NVLink domain", "2, 4, 8")),
        (("--gpus", "64"), ("memory", "--gpus 128")),
        (("--preset", "proxy-2gpu", "--gpu-name", "NVIDIA H100 80GB HBM3", "--gpus", "2"), ("H100", "--cluster")),
        (("--preset", "tiny", "--dispatcher", "hybridep"), ("hybridep needs GPUs",)),
        (("--preset", "tiny", "--dispatcher", "moc"), ("'moc' is unknown", "alltoall")),
        (("--preset", "tiny", "--", "--data-path", "absent"), ("absent.bin and absent.idx missing", "mock data")),
    ],
)
def test_refusals_name_the_flag_and_the_remedy(capsys, arguments, parts):
    text = refusal_of(capsys, *arguments)
    for part in parts:
        assert part in text
    assert "Traceback" not in text


def test_all_problems_are_listed_at_once(capsys, tmp_path):
    (tmp_path / "file").touch()
    save = str(tmp_path / "file" / "saved")
    user = ["--data-path", str(tmp_path / "absent"), "--save", save]
    text = refusal_of(capsys, "--preset", "tiny", "--dispatcher", "deepep", "--", *user)
    assert "deepep needs GPUs" in text and "absent.bin" in text and f"--save {save} cannot be written" in text


def test_clusters_are_found_by_the_drivers_name():
    assert presets.find_cluster("NVIDIA H200", 2).name == "h200_x2"
    assert presets.find_cluster("NVIDIA H200", 8).name == "hgx_h200_8gpu"
    assert presets.find_cluster("NVIDIA GB300", 4).name == "gb300_nvl72"
    with pytest.raises(MokConfigError, match="--cluster"):
        presets.find_cluster("NVIDIA H200", 16)


def test_missing_libraries_are_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "deep_ep" in (missing("hybridep", True, False) or "")
    assert "Transformer Engine" in (missing("alltoall", True, True) or "")
    assert missing("alltoall", True, False) is None and missing("mok", False, False) is None
