"""``python -m ringtrain``."""

import sys

from ringtrain.huge_pages import restart_with_huge_pages


def main() -> int:
    """Run the command line in a process that is fit for it."""
    restart_with_huge_pages()
    from ringtrain.cli import main as run_command_line  # not twice

    return run_command_line()


if __name__ == "__main__":
    sys.exit(main())
