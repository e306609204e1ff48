"""A stream with stop strings: what a client may see while the text still grows.

A stop string may be spread over several pieces, and what was sent cannot be taken back. `python -m labs.variants.stops`
streams a text in pieces and prints what goes out after each.
"""

from collections.abc import Sequence

from stage_a_naive.contract.stop_strings import first_stop, num_held_back


def stream(pieces: Sequence[str], stops: Sequence[str]) -> list[str]:
    """Return what is sent after each piece of an answer; joined, it is the text before the first stop string.

    Text is sent as soon as it can no longer become part of a stop string. The piece that completes a stop string is the
    last for which anything is returned. The answer's last piece also sends the text that was held back.
    """
    text, sent, num_sent = "", [], 0
    for number, piece in enumerate(pieces, 1):
        text += piece
        stop = first_stop(text, stops, len(piece))
        if stop is not None:
            return [*sent, text[num_sent:stop]]
        end = len(text) - (num_held_back(text, stops) if number < len(pieces) else 0)
        sent.append(text[num_sent:end])
        num_sent = end
    return sent


def main() -> None:
    pieces = ["To stop", ", say E", "ND", "LESS, or", " EN", "D.", " Never seen"]
    for piece, sent in zip(pieces, stream(pieces, ["END."]), strict=False):
        print(f"{piece!r:12} -> {sent!r}")


if __name__ == "__main__":
    main()
