"""The verb `plan`: exit codes, text, JSON, comparison, explanation, and that no torch is loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.started import LIMIT

from shardwright.errors import ConfigError
from shardwright.planner.verb import Request, run_plan

LLAMA_8B = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}


def plan(request: Request, **options: Any) -> tuple[int, str]:
    lines: list[str] = []
    code = run_plan(request, write=lambda line: lines.append(str(line)), **options)
    return code, "\n".join(lines)


def request(
    model: str = "llama-3-8b",
    devices: int = 8,
    length: int = 8192,
    batch: int = 64,
    device: str = "h100-sxm-80gb",
    **more: Any,
) -> Request:
    return Request(model=model, devices=devices, max_length=length, global_batch_size=batch, device=device, **more)


def test_llama_8b_on_8_devices() -> None:
    code, text = plan(request(tokens=1e12))
    assert code == 0
    for part in (
        "8.0 B parameters on 8 x h100-sxm-80gb",
        "Test first: FSDP2",
        "Check before a long run: units",
        "of 80.0 GiB",
        "Layouts that fit",
        "Does not fit",
        "ddp ",
        "What this layout does not solve",
        "padding",
        "effective training time",
        "C = 6PD",
        "MFU",
    ):
        assert part in text, part


def test_70b_on_8_devices_exits_4_and_says_what_would_fit() -> None:
    code, text = plan(request("llama-3-70b", 8, 4096, 64))
    assert code == 4
    assert (
        "Nothing fits" in text
        and "16 devices instead of 8" in text
        and "b200-sxm-180gb" in text
        and "cpu_offload" in text
    )


def test_offload_is_ranked_when_asked_for() -> None:
    code, text = plan(request("llama-3-70b", 8, 4096, 64, offload=True))
    assert code == 0 and "ZeRO-3 with offload" in text and "--memory.cpu_offload params" in text


def test_json_holds_the_same_answer() -> None:
    code, text = plan(request("llama-3-70b", 64, 4096, 128), as_json=True)
    data = json.loads(text)
    assert code == 0 and data["fits"] and data["first_to_test"]["name"] == "zero3"
    first = data["first_to_test"]
    assert sum(first["parts"].values()) == pytest.approx(first["seconds"])
    assert first["tokens_per_second"] == pytest.approx(128 * 4096 / first["seconds"])
    assert sum(first["composition"].values()) == pytest.approx(first["allocated_bytes"])
    assert data["layouts_considered"] > 100_000 and data["path"]["name"] == "FSDP2"


def test_compare_two_layouts() -> None:
    code, text = plan(request(), compare=("zero3", "zero1+tp2"))
    assert code == 0 and "zero3 takes" in text and "times the memory of zero1+tp2" in text
    code, text = plan(request("llama-3-70b", 8, 4096, 64), compare=("ddp", "zero3"))
    assert code == 4 and "ddp: does not fit" in text
    with pytest.raises(ConfigError, match="num_key_value_heads = 8 is not divisible by tp_size = 16"):
        plan(request(devices=16), compare=("tp16", "zero3"))


def test_explain_examples_and_fields() -> None:
    code, text = plan(Request(), explain="examples")
    assert code == 0
    for number in (
        "1.12 TB",
        "112 GB",
        "7P bytes",
        "5.5P bytes",
        "17.5 GB",
        "62.5 GB",
        "50.6 GB",
        "7.9 GB",
        "2.15 GB",
        "20 ms",
        "64 sequences",
        "5.88e+23",
        "272 days",
        "3 units",
        "2 units",
    ):
        assert number in text, number
    code, text = plan(request(), explain="compute")
    assert code == 0 and "qkv" in text and "8,192 x 4,096 x 6,144" in text and "of peak" in text
    code, text = plan(request("llama-3-70b", 8, 4096, 64), explain="memory")
    assert code == 4 and "needs least" in text and "peak = the largest sum" in text
    with pytest.raises(ConfigError, match="Did you mean `memory`"):
        plan(request(), explain="memori")


def test_config_json_and_generic_sizes_agree_with_the_known_shape(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    known = json.loads(plan(request(), as_json=True)[1])
    read = json.loads(plan(request(str(tmp_path)), as_json=True)[1])
    sizes = Request(
        layers=32,
        hidden=4096,
        heads=32,
        kv_heads=8,
        ffn=14336,
        vocab=128256,
        devices=8,
        max_length=8192,
        global_batch_size=64,
    )
    generic = json.loads(plan(sizes, as_json=True)[1])
    assert known["first_to_test"] == read["first_to_test"]
    assert generic["first_to_test"]["seconds"] == pytest.approx(known["first_to_test"]["seconds"])


def test_run_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    run = tmp_path / "run.yaml"
    run.write_text(
        f"model: {{model_name_or_path: {tmp_path}, init: random}}\n"
        "data: {train: [x.jsonl], max_length: 8192}\n"
        "training: {global_batch_size: 64, max_steps: 1}\nprecision: {param_dtype: bf16}\n"
    )
    code, text = plan(Request(run_file=run, devices=8, device="h100"))
    assert code == 0 and "64 rows of 8,192 tokens; bf16 compute, fp32 gradient reduction" in text
    code, text = plan(Request(run_file=run, devices=8, device="h100", overrides=("--data.max_length", "4096")))
    assert "64 rows of 4,096 tokens" in text
    packed = ("--data.batching", "pack")
    code, text = plan(Request(run_file=run, devices=8, device="h100", overrides=packed))
    assert "attention is counted over whole rows" in text
    code, text = plan(Request(run_file=run, devices=8, device="h100", overrides=packed, document_length=700.4))
    assert "64 rows of 8,192 tokens in documents of 700 tokens" in text and "counted over whole rows" not in text
    assert "The planner does not know" not in text
    own = ("--training.optimizer", "torch.optim:RMSprop")
    code, text = plan(Request(run_file=run, devices=8, device="h100", overrides=own))
    assert "The planner does not know torch.optim:RMSprop: its states and step are counted as those of adamw." in text


def test_a_hardware_file_of_a_cpu_is_planned_as_the_catalogues_cpu(tmp_path: Path) -> None:
    """`doctor` writes the processor's name, so the name does not say that the device is a CPU: the key `kind` does."""
    file = tmp_path / "hardware.yaml"
    file.write_text("name: amd-epyc-9b14 x 16\nlike: cpu\nkind: cpu\n")
    asked = [request("gpt2", 2, 256, 8, device=device) for device in ("cpu", str(file))]
    named, measured = (json.loads(plan(one, as_json=True)[1])["first_to_test"] for one in asked)
    assert measured == named
    file.write_text("like: cpu\n")  # `like` gives the kind too
    assert json.loads(plan(asked[1], as_json=True)[1])["first_to_test"] == named


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (Request(model="llama-3-8b", max_length=1, global_batch_size=1), "--devices is not given"),
        (Request(devices=8, max_length=1, global_batch_size=1), "No model is given"),
        (request("llama-3-9b"), "llama-3-8b"),
        (Request(layers=2, devices=8, max_length=1, global_batch_size=1), "--hidden, --heads, --vocab"),
        (request("my.module:build"), "Python code"),
        (request(device="h101-sxm-80gb"), "Did you mean `h100-sxm-80gb`"),
        (request(param_dtype="bf61"), "--param-dtype bf61 is not known"),
        (request(document_length=-1.0), "must be above 0"),
        (request(batch=0), "--global-batch-size is not given|at least 1"),
    ],
)
def test_requests_that_are_refused(wrong: Request, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(wrong)


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys; from shardwright.planner.verb import Request, run_plan; "
        "request = Request(model='llama-3-8b', devices=8, max_length=8192, global_batch_size=64); "
        "run_plan(request, write=lambda line: None); "
        "heavy = ('torch', 'numpy', 'transformers', 'datasets', 'pydantic', 'yaml'); "
        "print([m for m in heavy if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT, check=True)
    assert result.stdout.strip() == "[]", result.stdout
