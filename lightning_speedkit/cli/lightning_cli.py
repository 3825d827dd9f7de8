"""A LightningCLI with a ``presets:`` key: ``python train.py fit --config run.yaml --presets bf16-mixed,accumulate-4``.

A preset is the weakest voice: presets < default config files < environment < ``--config`` < command line, also where
a stronger one names the Trainer's own default. Callbacks and plugins of a preset are added to the configured ones; a
configured one of the same class (for plugins: of the same kind) takes the preset's place. The saved config spells out
what the presets set, and runs again as the same Trainer.

How: the command line is parsed once to learn the presets, a second time with other defaults to learn which of their
settings are given explicitly (those that stay the same), and then with the presets' arguments as defaults.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NoReturn

import yaml
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning_utilities.core.imports import RequirementCache
from typing_extensions import override

from lightning_speedkit.cli.config_entries import (
    Namespace,
    as_namespace,
    class_of,
    entries,
    explicit_settings,
    hint_of_presets,
    marks_for,
    split_names,
)
from lightning_speedkit.errors import MissingExtraError, SpeedkitError
from lightning_speedkit.presets import names as preset_names
from lightning_speedkit.presets.catalogue import REGISTRY
from lightning_speedkit.presets.merge import expand, merge
from lightning_speedkit.presets.selection import Given, settle
from lightning_speedkit.registry import TrainerPatch

__all__ = ["SpeedkitCLI"]


class _Parser(LightningArgumentParser):
    """Its errors say what is meant by ``preset:``."""

    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        super().error(f"{message}{hint_of_presets(message)}", ex)


class SpeedkitCLI(LightningCLI):
    """LightningCLI with presets by name; everything else is LightningCLI's, see there for the arguments.

    ``presets`` is a list of names: in a config file, with ``--presets a,b`` or ``--presets '[a, b]'``, or, to add one
    to those of the config file, with ``--presets+ c``. An unknown name, two presets that contradict each other, and a
    machine that lacks what a preset needs end the command with exit code 2 and a message, as a wrong argument does.

    Raises:
        MissingExtraError: If jsonargparse is not installed.

    >>> from lightning.pytorch.demos.boring_classes import BoringModel
    >>> cli = SpeedkitCLI(
    ...     BoringModel,
    ...     run=False,
    ...     save_config_callback=None,
    ...     seed_everything_default=False,
    ...     args={"presets": ["fp32"], "trainer": {"accelerator": "cpu", "logger": False}},
    ... )
    >>> cli.trainer.precision, cli.config.presets
    ('32-true', ['fp32'])
    """

    @override
    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        if self.parser_class is LightningArgumentParser:
            self.parser_class = _Parser
        return super().init_parser(**kwargs)

    @override
    def setup_parser(
        self, add_subcommands: bool, main_kwargs: dict[str, Any], subparser_kwargs: dict[str, Any]
    ) -> None:
        if not RequirementCache("jsonargparse[signatures]>=4.39"):
            raise MissingExtraError("SpeedkitCLI", extra="cli", library="jsonargparse[signatures]")
        super().setup_parser(add_subcommands, main_kwargs, subparser_kwargs)

    @override
    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        super().add_default_arguments_to_parser(parser)
        parser.add_argument(
            "--presets",
            type=list[str] | str | None,
            default=[],
            help=f"Names of presets, set beneath all other settings. Known: {', '.join(preset_names())}.",
        )

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        if isinstance(args, (dict, Namespace)):
            super().parse_arguments(parser, args)
            self._add_presets(parser, lambda: parser.parse_object(args))
            return
        words = list(sys.argv[1:] if args is None else args)
        prints = [word for word in words if word.partition("=")[0] == "--print_config"]
        words = [word for word in words if word not in prints]
        if prints:  # the parser by itself would print before the presets are known
            self._print_config(parser, words, prints)
        elif args is None:
            self.config = parser.parse_args(words)
        else:
            super().parse_arguments(parser, words)
        self._add_presets(parser, partial(parser.parse_args, words))

    def _add_presets(self, parser: LightningArgumentParser, parse: Callable[[], Namespace]) -> None:
        """Parses again, with the presets beneath what is configured."""
        own_parser, section = self._own(parser, self.config)
        names = split_names(section["presets"])
        if not names:
            section["presets"] = names
            return
        patch = self._patch(names, own_parser, section, lambda: self._own(parser, parse())[1])
        with _defaults(own_parser, patch.arguments):
            self.config = parse()
        section = self._own(parser, self.config)[1]
        subcommand = self.config.get("subcommand")
        added = {"presets": names, "trainer": _with_parts(section["trainer"], patch)}
        self.config = parser.parse_object({subcommand: added} if subcommand else added, self.config)

    def _patch(
        self,
        names: list[str],
        own_parser: LightningArgumentParser,
        section: Namespace,
        parse_section: Callable[[], Namespace],
    ) -> TrainerPatch:
        """What the presets add beneath what is configured; a fault of theirs is an error of the command line."""
        trainer = section["trainer"]
        try:
            settings = merge(expand(names, REGISTRY))
            marks = marks_for(settings, trainer)
            with _defaults(own_parser, marks):
                marked = parse_section()["trainer"]
            given = explicit_settings(trainer, marked, marks)
            extra = [*self._always_callbacks(), *self._callbacks_by_key(own_parser, section)]
            given = Given(
                arguments=given.arguments,
                callbacks=(*given.callbacks, *extra),
                plugins=given.plugins,
                keys=given.keys,
            )
            patch = settle(names, given)
        except SpeedkitError as error:
            own_parser.error(str(error))
        missing = [name for name in patch.arguments if name not in trainer]
        if missing:
            own_parser.error(
                f"The presets {', '.join(names)} set {', '.join(missing)}, which this command's Trainer does not take."
            )
        return patch

    def _own(self, parser: LightningArgumentParser, config: Namespace) -> tuple[LightningArgumentParser, Namespace]:
        """The parser and the part of the config of the chosen subcommand, or the only ones."""
        subcommand = config.get("subcommand")
        return (self._subcommand_parsers[subcommand], config[subcommand]) if subcommand else (parser, config)

    def _always_callbacks(self) -> list[type]:
        always = self.trainer_defaults.get("callbacks") or []
        return [type(callback) for callback in (always if isinstance(always, list) else [always])]

    @staticmethod
    def _callbacks_by_key(own_parser: LightningArgumentParser, section: Namespace) -> list[type]:
        """The callbacks that the program configures under keys of their own, with ``add_lightning_class_args``."""
        found = []
        for key in own_parser.callback_keys:
            group = (own_parser.groups or {}).get(key)
            cls = getattr(group, "group_class", None) or class_of(section.get(key))
            if isinstance(cls, type):
                found.append(cls)
        return found

    def _print_config(self, parser: LightningArgumentParser, words: list[str], prints: list[str]) -> None:
        """Prints and exits, as the parser does: without validation, so that it serves to start a config file."""
        subcommands = getattr(self, "_subcommand_parsers", {})
        typed = [word for word in words if word in subcommands][:1]  # else the config file says which one

        def parse() -> Namespace:
            printed = _printed(parser, words)
            if typed:
                printed = {typed[0]: printed}
            chosen = next((name for name in subcommands if name in printed), None)
            config: Namespace = as_namespace({**printed, "subcommand": chosen} if chosen else printed)
            return config

        self.config = parse()
        own_parser, section = self._own(parser, self.config)
        names = split_names(section.get("presets"))
        if names:
            patch = self._patch(names, own_parser, section, lambda: self._own(parser, parse())[1])
            with _defaults(own_parser, patch.arguments):
                self.config = parse()
            section = self._own(parser, self.config)[1]
            section["presets"] = names
            for key, value in _with_parts(section["trainer"], patch).items():
                section["trainer"][key] = value
        parser.parse_args([*typed, *prints], namespace=self.config)


@contextlib.contextmanager
def _defaults(parser: LightningArgumentParser, arguments: Mapping[str, Any]) -> Iterator[None]:
    """These Trainer arguments as the parser's defaults, for the time of one parse."""
    files, parser.default_config_files = parser.default_config_files, None
    before = {f"trainer.{name}": parser.get_default(f"trainer.{name}") for name in arguments}
    parser.default_config_files = files
    parser.set_defaults({f"trainer.{name}": value for name, value in arguments.items()})
    try:
        yield
    finally:
        parser.set_defaults(before)


def _with_parts(trainer: Namespace, patch: TrainerPatch) -> dict[str, Any]:
    """The presets' callbacks and plugins, and after them the configured ones."""
    lists = {"callbacks": patch.callbacks, "plugins": patch.plugins}
    return {
        name: [*(part.config() for part in parts), *entries(trainer, name)] for name, parts in lists.items() if parts
    }


def _printed(parser: LightningArgumentParser, words: list[str]) -> Any:
    """The config as ``--print_config`` shows it: not validated, so that required arguments may be missing."""
    text = io.StringIO()
    try:
        with contextlib.redirect_stdout(text):
            parser.parse_args([*words, "--print_config"])
    except SystemExit as end:
        if end.code:
            raise
    return yaml.safe_load(text.getvalue())
