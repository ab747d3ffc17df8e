"""``python -m ringtrain``."""

import sys

from ringtrain.huge_pages import restart_with_huge_pages


def main() -> int:
    """Start once more with large pages where that helps, then run the command."""
    restart_with_huge_pages()
    from ringtrain.cli import main as run_command_line  # which would be imported twice before

    return run_command_line()


if __name__ == "__main__":
    sys.exit(main())
