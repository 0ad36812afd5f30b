"""``tpu-compile``: look into what a model becomes, prove that it is right, and see what this machine offers.

Exit status: 0 done; 1 a failure, or a difference that was looked for and found; 2 a wrong command.
A command's module is imported when the command runs: ``tpu-compile --help`` loads neither torch nor jaxlib.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import click

from tpu_compile import __version__
from tpu_compile.errors import ConfigError, TpuCompileError, nearest, plain

COMMANDS = {
    "inspect": ("inspect:inspect", "What a model becomes: graphs, StableHLO, HLO, costs, memory, cache key."),
    "export": ("export:export", "A model as one file that tpu_compile.load runs without the model's code."),
    "aot": ("warming:aot", "Compile and store a model, so that a new process starts without tracing."),
    "compare": ("compare:compare", "Prove that compiled equals eager on your model, or find the op that differs."),
    "estimate": ("estimate:estimate", "Step time, memory, largest batch and cost on TPUs that are not here."),
    "advise": ("advise:advise", "What to change about a model for a TPU, with the gain that compiling it shows."),
    "ops": ("ops:ops", "How each aten operator is lowered."),
    "doctor": ("doctor:doctor", "What is installed, what will be used, and what is wrong."),
    "config": ("knobs:config", "Every setting with its value and where it came from."),
    "cache": ("cache:cache", "Compiled programs on disk: list, explain, verify, warm, prune, clear, export, import."),
}
"""Name → (module of this package: function in it, what ``--help`` says)."""


class Commands(click.Group):
    """The commands above, each imported when it is asked for; errors as one message and an exit status."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(f"tpu_compile.cli.{module}"), name)
        if not any(p.name == "traceback" for p in command.params):
            command.params.append(_traceback_option())
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            ctx.fail(f"No command is called {args[0]!r}.{nearest(args[0], COMMANDS)}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.ClickException as error:
            if ctx.meta.get("traceback") and error.__cause__ is not None:
                raise error.__cause__ from None
            raise
        except Exception as error:
            if ctx.meta.get("traceback") or not _is_expected(error):
                raise
            click.echo(f"Error: {_message(error)}", err=True)
            sys.exit(2 if isinstance(error, ConfigError) else 1)


def _traceback_option() -> click.Option:
    return click.Option(
        ["--traceback"],
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=lambda ctx, _, value: ctx.meta.update(traceback=True) if value else None,
        help="Show where an error was raised.",
    )


def _is_expected(error: Exception) -> bool:
    """Errors that say what to do: ours, and Dynamo's about the user's code. Others are faults that need a traceback."""
    return isinstance(error, TpuCompileError) or type(error).__module__ == "torch._dynamo.exc"


def _message(error: Exception) -> str:
    wrapped = type(error).__name__ == "BackendCompilerFailed"  # not an error of ours: where it was raised matters
    return plain(error) + ("\n--traceback shows where." if wrapped else "")


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="tpu-compile")
def main() -> None:
    """torch.compile(model, backend="tpu"), looked at from outside."""
