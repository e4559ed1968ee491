"""`mok-megatron plan` as a user runs it: tables, JSON, pictures, scripts and exit status."""

import argparse
import json
import subprocess
import warnings

import pytest

from mok_megatron import cli

HEADLINE = ["plan", "--model", "deepseek_v3", "--cluster", "gb300_nvl72", "--racks", "4"]


def test_tables(capsys):
    assert cli.main(HEADLINE) == 0
    text = capsys.readouterr().out
    for part in (
        "on 4 racks of NVIDIA GB300 NVL72: 256 of 288 GPUs",
        "a prediction",
        "ASSUMED",
        "group g is ranks 64g to 64g + 63; groups checked (4, all): consecutive, and inside one rack",
        "16 of the 18 of a rack; 2 a rack are spare",
        "fused layer's workspace",
        "network GB",
        "forward = max(products, memory, nvlink) + edges",
        "#SBATCH --segment=16",
        "BlockSizes=18",
        "--expert-model-parallel-size 64",
    ):
        assert part in text
    assert max(len(line) for line in text.splitlines() if "torchrun" not in line) < 180


def test_json(capsys):
    assert cli.main([*HEADLINE, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["prediction"] is True
    assert plan["rates_measured"] is False
    assert plan["sizes"]["ep"] == 64
    assert plan["placement"]["spare_nodes_per_domain"] == 2
    assert plan["placement"]["expert_groups"][1] == {"ranks": [64, 127], "stage": 0, "domain": 1}
    assert sum(plan["memory"]["items"].values()) == pytest.approx(max(plan["memory"]["total_by_stage"]))
    assert plan["times"]["moe_forward"]["total"] > 0


def test_files_and_scripts(tmp_path, capsys):
    assert cli.main([*HEADLINE, "--output", str(tmp_path / "plan")]) == 0
    names = {path.name for path in (tmp_path / "plan").iterdir()}
    assert names == {"plan.txt", "plan.json", "node.sh", "job.sh", "topology.conf", "racks.png"}
    for script in ("node.sh", "job.sh"):
        subprocess.run(["bash", "-n", tmp_path / "plan" / script], check=True, timeout=30)
    picture = (tmp_path / "plan" / "racks.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 10_000


def test_node_script_passes_megatron_what_the_plan_says(tmp_path):
    """Run node.sh with a torchrun that prints its arguments, and let Megatron parse them."""
    assert cli.main([*HEADLINE, "--pp", "2", "--recompute", "full", "--bf16-moments", "--output", str(tmp_path)]) == 0
    torchrun = tmp_path / "bin" / "torchrun"
    torchrun.parent.mkdir()
    torchrun.write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$@"\n')
    torchrun.chmod(0o755)
    environment = {
        "PATH": f"{torchrun.parent}:/usr/bin:/bin",
        "SLURM_NODEID": "5",
        "MASTER_ADDR": "rack01-node01",
        "MASTER_PORT": "29500",
    }
    run = subprocess.run(
        ["bash", tmp_path / "node.sh", "--mock-data"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    words = run.stdout.splitlines()
    entry = words.index("pretrain_gpt.py")
    assert words[:entry] == [
        "--nnodes=64",
        "--nproc-per-node=4",
        "--node-rank=5",
        "--master-addr=rack01-node01",
        "--master-port=29500",
    ]
    args = parse_with_megatron(words[entry + 1 :])
    assert args.expert_model_parallel_size == 64
    assert args.expert_tensor_parallel_size == 1
    assert args.pipeline_model_parallel_layout.startswith("Et")
    assert args.moe_layer_freq == [0] * 3 + [1] * 58
    assert args.recompute_granularity == "full"
    assert args.mock_data


def parse_with_megatron(words):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.training.arguments import add_megatron_arguments

        from mok_megatron.config import add_flags
    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False, conflict_handler="resolve"))
    add_flags(parser)
    for action in parser._actions:
        if "--moe-token-dispatcher-type" in action.option_strings:
            action.choices = [*action.choices, "mok"]
    return parser.parse_args(words)


def test_one_node_needs_no_slurm(tmp_path, capsys):
    command = ["plan", "--model", "tiny", "--cluster", "h200_x2", "--gpus", "2", "--output", str(tmp_path)]
    assert cli.main(command) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"plan.txt", "plan.json", "node.sh", "racks.png"}
    assert "torchrun --standalone --nproc-per-node=2" in (tmp_path / "node.sh").read_text()
    assert "measured on it" in capsys.readouterr().out


def test_segments_divide_the_job_where_the_last_rack_is_part_full(capsys):
    command = ["plan", "--model", "qwen3_5_397b_a17b", "--cluster", "gb300_nvl72", "--gpus", "96", "--json"]
    assert cli.main(command) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["sizes"]["ep"], plan["placement"]["nodes"]) == (32, 24)
    assert "#SBATCH --segment=8\n" in plan["scripts"]["job.sh"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--cluster", "gb300_nvl72"], "--model must be given; --list shows the names"),
        (["--model", "deepseek_v4", "--cluster", "gb300_nvl72", "--racks", "1"], "'deepseek_v4_pro'?"),
        (["--model", "tiny", "--cluster", "none.yaml", "--racks", "1"], "none.yaml: cannot be read"),
        (["--model", "tiny", "--cluster", "h200_x2"], "neither --gpus nor --racks"),
        (
            ["--model", "tiny", "--cluster", "h200_x2", "--gpus", "1", "--mok-minibatch-size", "5"],
            "--mok-minibatch-size 5",
        ),
        (["--model", "tiny", "--cluster", "h200_x2", "--gpus", "1", "--png", "/dev/null/x.png"], "/dev/null/x.png"),
        (["--model", "tiny", "--cluster", "h200_x2", "--gpus", "1", "--output", "/dev/null/x"], "/dev/null/x"),
    ],
)
def test_bad_input_is_one_message_and_status_2(words, says, capsys):
    assert cli.main(["plan", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("mok-megatron plan: ")
    assert says in error
    assert "Traceback" not in error


def test_list(capsys):
    assert cli.main(["plan", "--list"]) == 0
    text = capsys.readouterr().out
    assert "deepseek_v3" in text
    assert "gb300_nvl72" in text


def test_picture_of_many_racks_says_what_it_leaves_out(tmp_path):
    from mok_megatron.configs import load_cluster, load_model
    from mok_megatron.plan.draw import MAX_DRAWN, draw_racks
    from mok_megatron.plan.request import Request
    from mok_megatron.plan.search import make_plan

    plan = make_plan(Request(load_model("deepseek_v3"), load_cluster("gb300_nvl72"), domains=2))
    assert draw_racks(plan, tmp_path / "two.png") == 2
    many = make_plan(Request(load_model("qwen3_30b_a3b"), load_cluster("hgx_h200_8gpu"), domains=32))
    assert draw_racks(many, tmp_path / "many.png") == MAX_DRAWN
