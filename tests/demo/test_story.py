"""The story follows the numbers, also where they are bad news."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from lightning_speedkit.demo.results import DemoResults, Latency, QuantizationResult
from lightning_speedkit.demo.story import demo_document, demo_summary
from lightning_speedkit.facts import Hardware
from tests.demo.made_up import results, training


def _printed(told: DemoResults) -> str:
    console = Console(file=io.StringIO(), width=200)
    demo_summary(told).print(console)
    assert isinstance(console.file, io.StringIO)
    return re.sub(r"\s+", " ", console.file.getvalue().replace("\u202f", ""))


def test_gains_are_told_as_worked_out_by_hand() -> None:
    text = _printed(results())
    assert "a step waited 1.00 ms for its batch, from single files 10.0 ms" in text
    assert "2000 samples per second, 1.25× the speed of files. Two worker" in text
    assert "Together: 3200 samples per second, 2.00× the speed of files." in text
    assert (
        "The preset cpu chose precision bf16-mixed; its steps computed for 18.0 ms, those in 32-true for 30.0 ms"
        in text
    )
    assert "bit for bit the weights of training from files" in text
    assert "all four trainings lie within 0.50 points" in text
    assert "1.020 times the bare pixels and labels, and 2.38 times the bytes of the compressed files" in text
    assert "quantized 5 of 5 layers" in text
    assert "In batches of 64 it is 3.00× faster than float32." in text
    assert "told 98.00 % right, the int8 model 97.75 %" in text
    assert "Beware" not in text


def test_losses_are_told_as_losses() -> None:
    told = results()
    assert "In batches of 1 it is 2.00× slower than float32." in _printed(told)
    slow = replace(told, trainings=(*told.trainings[:3], training("LMDB, preset cpu", wall=8.0, data=0.1)))
    assert "Together: 800 samples per second, 2.00× slower than files." in _printed(slow)
    same = replace(told, trainings=(*told.trainings[:3], training("LMDB, preset cpu", wall=4.0, data=0.1)))
    assert "Together: 1600 samples per second, as fast as files." in _printed(same)


def test_other_work_on_the_machine_is_told() -> None:
    told = results()  # 29 and 30 ms for the same computation
    files, workers, _, tuned = told.trainings
    disturbed = replace(told, trainings=(files, workers, training("LMDB", wall=5.2, data=0.1), tuned))
    text = _printed(disturbed)
    assert "Beware: Other work disturbed this run: the same computation took 50.0 ms per step" in text
    assert "29.0 ms in another" in text
    assert "Other work disturbed" in demo_document(disturbed).to_html()
    assert "Other work disturbed" not in _printed(replace(disturbed, quick=True))  # it has a warning of its own


@pytest.mark.parametrize(("rounds", "how"), [(1, "each training ran once."), (2, "in reverse order, and the faster")])
def test_the_page_says_how_often_each_training_ran(rounds: int, how: str) -> None:
    assert how in demo_document(replace(results(), rounds=rounds)).to_html()


def test_a_difference_of_weights_or_accuracy_is_told() -> None:
    told = results()
    files, workers, _, tuned = told.trainings
    other = training("LMDB", wall=3.2, data=0.1, digest="cc", accuracy=0.965)
    text = _printed(replace(told, trainings=(files, workers, other, tuned)))
    assert "differ in their last bits or more" in text
    assert "1.50 points apart, more than the one point" in text
    equal = tuple(replace(run, test_accuracy=0.98) for run in told.trainings)
    assert "accuracies of all four trainings are equal" in _printed(replace(told, trainings=equal))


def test_a_store_smaller_than_its_files_is_told() -> None:
    told = results()
    small = replace(told, disk=replace(told.disk, file_bytes=8_000_000))
    assert "and less than the compressed files" in _printed(small)


def test_an_int8_model_that_was_not_kept_has_its_reason_and_no_numbers() -> None:
    told = replace(results(), quantization=QuantizationResult(kept=False, reason="accuracy fell by 3 points."))
    text = _printed(told)
    assert "Beware: There is no int8 model: accuracy fell by 3 points." in text
    assert "float32 int8" not in text
    assert "model in int8" not in demo_document(told).to_html()


def test_int8_as_fast_as_float_is_told_so() -> None:
    told = results()
    equal = (Latency(batch_size=4, seconds_float=0.001, seconds_int8=0.001),)
    text = _printed(replace(told, quantization=replace(told.quantization, latencies=equal)))
    assert "In batches of 4 it is as fast as float32." in text


def test_a_quick_run_warns_of_its_numbers() -> None:
    quick = replace(results(), quick=True)
    assert "Beware: This was a quick run" in _printed(quick)
    assert "This was a quick run" in demo_document(quick).to_html()


@pytest.mark.parametrize("accelerator", ["cpu", "cuda"])
def test_the_gpu_paragraph_suits_the_machine(accelerator: str) -> None:
    bundle = "cpu" if accelerator == "cpu" else "single-gpu"
    hardware = Hardware(accelerator=accelerator, device_name="a device", memory_bytes=2**30)
    text = _printed(replace(results(), hardware=hardware, bundle=bundle))
    assert ("takes the preset single-gpu instead of cpu" in text) == (accelerator == "cpu")
    assert ("This run used a GPU with the preset single-gpu" in text) == (accelerator == "cuda")


def test_the_page_has_every_section_and_refers_to_nothing_outside() -> None:
    page = demo_document(results()).to_html()
    titles = ("Time per step", "Accuracy", "On disk", "Quantized to int8", "On a GPU", "How it was measured")
    assert [title for title in titles if f">{title}</h2>" not in page] == []
    assert page.count("<svg") >= 6
    assert not re.search(r'(src|href)="(?!#)', page)
    assert "CC BY 4.0" in page
    assert "1 fit" not in page
    assert "62 s after Python" in page
