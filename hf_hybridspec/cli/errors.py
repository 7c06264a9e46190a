"""What the command refuses."""


class CommandError(Exception):
    """One sentence for standard error: what was given, what is allowed, the next step. The exit code is 2."""


def first_sentence(error: BaseException) -> str:
    """The first line of another library's message, without its final stop."""
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__).rstrip(".: ")
