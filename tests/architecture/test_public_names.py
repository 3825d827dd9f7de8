"""The public surface is frozen: a name is added or removed here on purpose."""

from __future__ import annotations

import inspect
import subprocess
import sys

import lightning_speedkit

PUBLIC = {
    "convert_model",
    "ShrinkPlan",
    "ShrinkReport",
    "StructuredPruning",
    "load_shrunk",
    "resize_to",
    "shrink_model",
    "Backbone",
    "BackboneTable",
    "apply_plan",
    "build_backbone",
    "lighten",
    "pick_backbone",
    "published_accuracies",
    "Distillation",
    "FakeQuantization",
    "Pruning",
    "QuantizationAwareTraining",
    "distillation_loss",
    "prune_weights",
    "GradientClipping",
    "NonFiniteGuard",
    "SpikeGuard",
    "AutoMicroBatch",
    "AverageWeights",
    "LRRangeTest",
    "OptimizerChoice",
    "ScheduleChoice",
    "ScheduleFreeSwitch",
    "build_optimizer",
    "build_schedule",
    "lr_range_test",
    "optimizers_for",
    "AccumulationScheduler",
    "ActivationCheckpointing",
    "BatchSizeSearch",
    "CacheRelease",
    "LeakMonitor",
    "OOMSnapshot",
    "PeakMemory",
    "ChannelsLast",
    "CompileModel",
    "CutMix",
    "Float8Precision",
    "MatmulPrecision",
    "estimate_memory",
    "find_batch_size",
    "plan_checkpoints",
    "measure_precision",
    "DevicePrefetcher",
    "DeviceTransform",
    "ImageField",
    "LMDBDataModule",
    "LMDBDataset",
    "LMDBWriter",
    "LoaderSettingsSearch",
    "MixUp",
    "Normalize",
    "QuantizeOnFitEnd",
    "RandomCrop",
    "RandomErase",
    "RandomFlip",
    "RingLoader",
    "RunRecorder",
    "SpeedkitCLI",
    "SpeedkitDDPStrategy",
    "HangWatch",
    "ModelParallelPlan",
    "PipelineStrategy",
    "SpeedkitDataModule",
    "SpeedkitError",
    "SpeedkitMixedPrecision",
    "__version__",
    "fastest_precision",
    "load_quantized",
    "presets",
    "stage_to_local",
    "suggest_loader",
    "suggest_strategy",
    "SpotInterruption",
    "check_launch",
    "newest_checkpoint",
    "trainer_kwargs",
    "verify_lmdb",
    "write_lmdb",
}


def test_public_names_are_these() -> None:
    assert set(lightning_speedkit.__all__) == PUBLIC
    assert set(dir(lightning_speedkit)) >= PUBLIC


def test_every_public_name_is_there_and_documented() -> None:
    for name in PUBLIC - {"__version__"}:
        value = getattr(lightning_speedkit, name)
        assert inspect.getdoc(value), f"{name} has no docstring"


def test_presets_is_a_module_with_its_three_functions() -> None:
    assert inspect.ismodule(lightning_speedkit.presets)
    assert {"names", "get", "register"} <= set(dir(lightning_speedkit.presets))


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(lightning_speedkit, "nothing_of_that_name")


def test_import_leaves_optional_libraries_alone() -> None:
    optional = [
        "matplotlib",
        "jinja2",
        "jsonargparse",
        "torchao",
        "fsspec",
        "aiohttp",
        "cv2",
        "simplejpeg",
        "pyarrow",
        "onnx",
        "onnxruntime",
        "torch.ao.quantization.fx",
    ]
    code = (
        "import sys, lightning; before = set(sys.modules); import lightning_speedkit; "
        f"print([m for m in {optional} if m in sys.modules and m not in before])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert result.stdout.strip() == "[]"


def test_import_changes_no_global_setting() -> None:
    code = """
import logging, os, random, warnings, lightning, torch

def loggers():
    known = logging.root.manager.loggerDict.items()
    return {name: (one.level, len(one.handlers)) for name, one in known if isinstance(one, logging.Logger)}

def state():
    return [
        logging.root.level, len(logging.root.handlers), dict(os.environ), random.getstate(),
        torch.get_rng_state().tolist(), torch.get_num_threads(), torch.get_float32_matmul_precision(),
        list(warnings.filters), torch.backends.quantized.engine,
    ]

before, loggers_before = state(), loggers()
import lightning_speedkit
after, loggers_after = state(), loggers()
assert after == before, [(a, b) for a, b in zip(before, after) if a != b]
assert all(loggers_after[name] == value for name, value in loggers_before.items())
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
