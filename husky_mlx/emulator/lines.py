"""From a code address in a compiled kernel to the line of its text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

UNKNOWN = "an unknown line"


def find(library: Path, offset: int) -> str:
    """``body line 12`` for a code address ``offset`` bytes after ``emulator_thread``.

    Reads the library's line table, for which pyelftools is needed; only ELF files have it (on a Mac
    the line stays unknown).
    """
    try:
        from elftools.common.exceptions import ELFError
        from elftools.elf.elffile import ELFFile
    except ImportError:
        return UNKNOWN
    with library.open("rb") as file:
        try:
            elf: Any = ELFFile(file)
        except ELFError:
            return UNKNOWN
        entry = elf.get_section_by_name(".symtab").get_symbol_by_name("emulator_thread")[0]
        debug = elf.get_dwarf_info()
        for unit in debug.iter_CUs():
            place = _search(debug.line_program_for_CU(unit), entry["st_value"] + offset)
            if place is not None:
                return place
    return UNKNOWN


def _search(program: Any, address: int) -> str | None:
    before = None
    for entry in program.get_entries():
        state = entry.state
        if state is None:
            continue
        if before is not None and before.address <= address < state.address:
            return f"{_file_name(program, before.file)} line {before.line}"
        before = None if state.end_sequence else state
    return None


def _file_name(program: Any, index: int) -> str:
    # DWARF 5 counts files from 0, earlier versions from 1.
    first = 0 if program["version"] >= 5 else 1
    name = program["file_entry"][index - first].name
    return Path(name.decode() if isinstance(name, bytes) else name).name
