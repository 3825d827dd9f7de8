"""Techniques around the optimizer step."""

from lightning_speedkit.optimize.accumulate import AccumulationScheduler
from lightning_speedkit.optimize.accumulation_count import counter_of, labels_in
from lightning_speedkit.optimize.accumulation_plan import WindowPlan
from lightning_speedkit.optimize.accumulation_ranks import DataRanks
from lightning_speedkit.optimize.accumulation_run import AccumulationRun
from lightning_speedkit.optimize.accumulation_schedule import checked_schedule, count_steps, factor_at
from lightning_speedkit.optimize.accumulation_window import (
    AccumulationWindow,
    samples_in,
    scale_gradients,
    weigh_backward,
)
from lightning_speedkit.optimize.batch_join import join_outputs
from lightning_speedkit.optimize.batch_split import samples_of, split_batch
from lightning_speedkit.optimize.clip import GradientClipping
from lightning_speedkit.optimize.clip_gradients import clip_by_norm, clip_by_value, clip_units, gradient_norm
from lightning_speedkit.optimize.clip_thresholds import PercentileLimit, ZScoreLimit
from lightning_speedkit.optimize.lr_range import LRRangeTest
from lightning_speedkit.optimize.lr_range_curve import LRRange
from lightning_speedkit.optimize.lr_range_sweep import lr_range_test
from lightning_speedkit.optimize.micro_batch import AutoMicroBatch, backward_in_pieces
from lightning_speedkit.optimize.micro_batch_retry import run_until_it_fits
from lightning_speedkit.optimize.micro_batch_size import MicroBatchSize
from lightning_speedkit.optimize.muon import MuonWithAdamW, hidden_matrices
from lightning_speedkit.optimize.non_finite_guard import NonFiniteGuard, has_non_finite_gradient
from lightning_speedkit.optimize.optimizer import build_optimizer
from lightning_speedkit.optimize.optimizer_choice import OptimizerChoice, ScheduleChoice
from lightning_speedkit.optimize.optimizer_groups import layer_numbers, parameter_groups, parameter_settings
from lightning_speedkit.optimize.optimizers_for import optimizers_for, schedule_for
from lightning_speedkit.optimize.schedule import build_schedule, scale_at, schedule_names
from lightning_speedkit.optimize.schedule_free import ScheduleFreeAdamW
from lightning_speedkit.optimize.schedule_free_switch import ScheduleFreeSwitch
from lightning_speedkit.optimize.skipped_steps import drop_gradients
from lightning_speedkit.optimize.snapshot import Snapshot
from lightning_speedkit.optimize.spike_guard import SpikeGuard, is_spike
from lightning_speedkit.optimize.weight_averaging import AverageWeights
from lightning_speedkit.optimize.weight_averaging_values import WeightAverage

__all__ = [
    "AccumulationRun",
    "AccumulationScheduler",
    "AccumulationWindow",
    "AutoMicroBatch",
    "AverageWeights",
    "DataRanks",
    "GradientClipping",
    "LRRange",
    "LRRangeTest",
    "MicroBatchSize",
    "MuonWithAdamW",
    "NonFiniteGuard",
    "OptimizerChoice",
    "PercentileLimit",
    "ScheduleChoice",
    "ScheduleFreeAdamW",
    "ScheduleFreeSwitch",
    "Snapshot",
    "SpikeGuard",
    "WeightAverage",
    "WindowPlan",
    "ZScoreLimit",
    "backward_in_pieces",
    "build_optimizer",
    "build_schedule",
    "checked_schedule",
    "clip_by_norm",
    "clip_by_value",
    "clip_units",
    "count_steps",
    "counter_of",
    "drop_gradients",
    "factor_at",
    "gradient_norm",
    "has_non_finite_gradient",
    "hidden_matrices",
    "is_spike",
    "join_outputs",
    "labels_in",
    "layer_numbers",
    "lr_range_test",
    "optimizers_for",
    "parameter_groups",
    "parameter_settings",
    "run_until_it_fits",
    "samples_in",
    "samples_of",
    "scale_at",
    "scale_gradients",
    "schedule_for",
    "schedule_names",
    "split_batch",
    "weigh_backward",
]
