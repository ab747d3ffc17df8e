"""``python -m ringtrain``."""

import sys

from ringtrain.messages.hiding import refusing_hidden


def main() -> int:
    with refusing_hidden():
        from ringtrain.runtime.stdio import keep_streams

        keep_streams()
        from ringtrain.cli import main as run_command_line  # not earlier: it would be imported twice
        from ringtrain.runtime.run_record import record_exit
        from ringtrain.runtime.shutdown import note_exit_code, watch_end

    code: object = 1
    try:
        code = run_command_line()
        record_exit()
        return code
    except SystemExit as error:
        code = error.code
        raise
    finally:
        note_exit_code(code)
        watch_end(has_left_ranks=True)


if __name__ == "__main__":
    sys.exit(main())
