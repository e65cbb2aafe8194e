"""The options of launch.py, and those that are refused before a process starts."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from splitc.errors import LaunchError
from splitc.runtime.launch.options import add_options, check_options, use_checkpoints


def parsed(*arguments: str, restarts: int = 0) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_options(parser)
    args = parser.parse_args(arguments)
    use_checkpoints(args, restarts)
    return args


WRONG = [
    (["--save", "no/model.pt"], "--save no/model.pt: there is no folder"),
    (["--eval-every", "5"], "--eval-every needs --eval-data"),
    (["--accuracy"], "--accuracy needs --eval-data"),
    (["--lr", "nan"], "--lr nan: give a learning rate"),
    (["--epochs", "2"], "--epochs needs --data MODULE:FUNCTION that gives a Dataset"),
    (["--tensorboard", "runs"], "--tensorboard needs TensorBoard, which is not installed"),
    (["--save-every", "5"], "checkpoints holds step-000020 of an earlier run; go on from it with --resume"),
]


@pytest.mark.parametrize(("arguments", "text"), WRONG)
def test_options_that_would_fail_are_refused(
    arguments: list[str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "checkpoints" / "step-000020").mkdir(parents=True)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(LaunchError, match=text):
        check_options(parsed(*arguments))


def test_an_earlier_run_is_resumed_or_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "checkpoints" / "step-000020").mkdir(parents=True)
    for arguments in (["--save-every", "5", "--resume"], [], ["--save-every", "5", "--checkpoints", "others"]):
        check_options(parsed(*arguments))
    check_options(parsed(restarts=1))


def test_checkpoints_are_written_where_a_folder_or_restarts_ask_for_them() -> None:
    assert [parsed().saves, parsed("--resume").saves] == [False, False]
    assert [parsed("--checkpoints", "run").saves, parsed("--save-every", "5").saves] == [True, True]
    args = parsed(restarts=2)
    assert (args.saves, args.resume, args.checkpoints) == (True, True, Path("checkpoints"))


def test_steps_and_epochs_exclude_each_other() -> None:
    with pytest.raises(argparse.ArgumentError, match="not allowed with"):
        parsed("--steps", "3", "--epochs", "1")


def test_no_option_is_taken_by_torchrun_which_reads_abbreviations_of_its_own() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser)
    taken = [name for action in get_args_parser()._actions for name in action.option_strings]
    ours = [name for action in parser._actions for name in action.option_strings if name not in ("-h", "--help")]
    assert [name for name in ours if any(each.startswith(name) for each in taken)] == []
