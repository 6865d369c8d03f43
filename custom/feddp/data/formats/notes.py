"""What a user should know of how files were read, though nothing is wrong with them."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path


class Notes(Counter[tuple[str, Path]]):
    """How often each file gives rise to a note: {(what it says, the file): times}."""

    def lines(self) -> Iterator[str]:
        """Yields a line for each note, with the first of its files."""
        for what in sorted({what for what, _ in self}):
            files = {file: count for (each, file), count in self.items() if each == what}
            yield f"{what}: {sum(files.values())} in {len(files)} file(s), {next(iter(files))} first"
