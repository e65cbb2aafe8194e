"""`splitc completion`: what the shells offer."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.command import splitc

Capture = pytest.CaptureFixture[str]

OFFERED = [
    ("splitc insp", ["inspect"]),
    ("splitc verify net", ["net.py"]),
    ("splitc inspect net.py --cluster v100-1", ["v100-100gbe", "v100-10gbe"]),
    ("splitc inspect net.py --cluster min", ["mine.toml"]),
    ("splitc compile net.py --strategy la", ["late_multiply", "layer_separation"]),
    ("splitc example re", ["recommender", "resnet"]),
    ("splitc clusters rtx4090-2", ["rtx4090-2.5gbe"]),
    ("splitc run build --check", ["--check-finite", "--check-replicas", "--checkpoints"]),
    ("splitc export --sa", ["--safetensors"]),
]
"""What is typed, and what the shell offers for the last word."""

ASK = {
    "bash": """source completion; while read -ra COMP_WORDS; do
        COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _shtab_splitc 2>/dev/null; echo ${COMPREPLY[@]}; done""",
    "fish": "source completion; while read line; echo (complete -C $line | cut -f 1); end",
}
"""A script that answers each line with a line."""


@pytest.mark.parametrize("shell", ["bash", pytest.param("fish", marks=pytest.mark.slow)])
def test_a_shell_completes_commands_options_files_and_names(
    shell: str, net: None, tmp_path: Path, capsys: Capture
) -> None:
    pytest.importorskip("shtab", reason="needs shtab, the extra completion")
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell}")
    (tmp_path / "mine.toml").touch()
    done = splitc(capsys, f"completion {shell}")
    assert done.code == 0
    (tmp_path / "completion").write_text(done.out)
    typed = "".join(f"{line}\n" for line, _ in OFFERED)
    answers = subprocess.run([shell, "-c", ASK[shell]], input=typed, capture_output=True, text=True, check=True).stdout
    assert [sorted(line.split()) for line in answers.splitlines()] == [words for _, words in OFFERED]


def test_without_shtab_the_command_says_what_to_install(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("splitc.cli.completing.find_spec", lambda name: None)
    done = splitc(capsys, "completion zsh")
    assert (done.code, done.out) == (2, "") and 'run: pip install "splitc[completion]"' in done.err
