"""Rows on disk, one file a sample, so that a killed run goes on where it stopped."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Shard:
    """The file of one sample. Its name is a hash: nothing in a sample reaches the file system."""

    path: Path

    @staticmethod
    def of(folder: Path, *identity: object) -> Shard:
        """The shard of everything that a sample's rows depend on, apart from policy and budget."""
        digest = hashlib.sha256(json.dumps([repr(part) for part in identity]).encode()).hexdigest()
        return Shard(folder / f"{digest[:32]}.jsonl")

    def read(self) -> list[dict]:
        """Its rows; none where the file is missing or damaged, so that they are measured again."""
        try:
            return [json.loads(line) for line in self.path.read_text(encoding="utf-8").splitlines()]
        except (OSError, ValueError):
            return []

    def write(self, rows: Sequence[dict]) -> None:
        """Replace its rows, whole or not at all."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=self.path.parent, prefix=".")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.writelines(json.dumps(row, allow_nan=False) + "\n" for row in rows)
            Path(temporary).replace(self.path)
        finally:
            Path(temporary).unlink(missing_ok=True)
