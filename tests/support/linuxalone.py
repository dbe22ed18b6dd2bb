"""Tests of what Linux alone does: `tox -e portable` leaves them out
(`tests/support/othersystem.py`).
"""

from pathlib import Path

__all__ = ["TESTS", "holds"]

TESTS: dict[str, tuple[str, ...]] = {
    # Directories are opened, to be locked and flushed.
    "storage/test_commit.py": (
        "test_every_file_and_directory_is_flushed_before_the_name_is_given",
        "test_what_another_process_is_writing_is_not_swept_until_it_is_gone",
        "test_a_sweep_touches_only_what_it_is_about",
        "test_one_save_sweeps_what_another_of_the_same_name_has_left",
    ),
    # A directory has a name that Windows refuses.
    "cli/test_train_cli.py": ("test_a_line_is_a_record_however_long_and_whatever_is_in_it",),
    # Huge pages, glibc's malloc, limits, and what the C library is asked for.
    "backend/test_backend_cpu.py": (
        "test_a_host_buffer_begins_where_a_huge_page_could_and_ends_where_it_should",
    ),
    "backend/test_cpu_heap.py": (
        "test_free_memory_goes_back_when_memory_is_scarce_and_no_value_changes",
        "test_it_looks_only_after_the_process_has_grown",
    ),
    "backend/test_host_files.py": (
        "test_a_directory_that_cannot_be_opened_is_neither_opened_nor_flushed",
        "test_a_function_that_the_library_lacks_is_none",
        "test_the_peak_is_told_in_bytes_by_macos",
        "test_where_nothing_can_be_locked_that_is_said",
    ),
    "backend/test_locked_memory.py": ("test_what_cannot_be_locked_is_an_error_where_it_must_be",),
    "stream/test_stream_reader.py": ("test_a_failing_device_is_named",),
    # Memory has no name, or loses it while it is open.
    "backend/test_shared_memory.py": (
        "test_it_has_no_file_where_the_system_has_a_call_for_it",
        "test_without_that_call_it_is_a_file_whose_name_goes_once_both_have_it",
    ),
    # A directory has another name.
    "train/phases/test_phase_links.py": ("test_the_directory_is_linked_where_it_can_be",),
    # A test has tokens open that are made anew meanwhile, and a directory keeps its name while a
    # file in it is open.
    "data/test_data_cache.py": (
        "test_a_missing_file_is_made_anew",
        "test_damaged_tokens_are_made_anew_and_it_is_said",
        "test_kept_tokens_are_those_made_in_memory",
    ),
    # Directories are locked, and processes forked, so that one start goes on where another was
    # killed.
    "data/test_data_parts.py": ("*",),
    # The program that renders has no signals of Unix that it could be deaf to.
    "data/test_template_process.py": (
        "test_a_signal_that_goes_to_all_processes_is_the_parents",
        "test_the_consoles_keys_are_the_parents_too",
    ),
    # A file that is not open is swept: one that is keeps its name.
    "storage/test_partial.py": ("test_where_nothing_can_be_locked_nothing_is_swept",),
    # A file loses its name while it is open, and the calls that are watched, or made to fail, are
    # those of Linux.
    "storage/test_spillfile.py": (
        "test_what_is_read_is_what_was_written_and_no_name_is_ever_seen",
        "test_what_must_go_through_the_page_cache_does_not_stay_in_it",
        "test_a_write_that_fails_is_raised_in_the_training_thread",
        "test_a_read_that_fails_is_raised_in_the_training_thread",
    ),
    "storage/test_tensorfile.py": ("test_a_full_disk_is_said_so_and_leaves_the_old_file",),
    # Calls of the system that are watched, or made to fail, are those of Linux.
    "storage/test_directio.py": ("*",),
    # The process ends by the signal itself, where the C library can be asked for that.
    "train/test_stop.py": (
        "test_a_second_signal_ends_the_process_at_once_and_what_comes_twice_at_once_came_once",
    ),
}
"""The names of tests by the file, with `*` for all of it."""


def holds(file: Path, name: str) -> bool:
    """Say whether a test, by its file below `tests` and its name without parameters, is one of
    them.
    """
    names = TESTS.get(file.as_posix(), ())
    return name in names or "*" in names
