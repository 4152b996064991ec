"""banks.py - how a warp's access meets memory and shared memory, for the ladders. It needs no GPU.

    python3 dev/ladders/banks.py "33 * lane"              element 33 * lane of an array of 4-byte elements
    python3 dev/ladders/banks.py "32 * lane" --bytes 1    of an array of bytes
    python3 dev/ladders/banks.py "random(128)"            an element that each lane draws, 0 to 127; 1,000 warps do so

The array begins at a multiple of 128 bytes. The expression is Python's, of lane: 0 to 31, the thread's number in its
warp. // divides integers, % is the remainder, ^ exclusive or. --bytes is what a lane reads with one instruction: 1, 2,
4, 8 or 16. Printed are the sectors of 32 bytes that a load from memory wants, the clocks that the same access of
shared memory takes, and the lanes at each bank.
"""
import argparse
import random
import signal

BANKS, WORD, SECTOR, LANES = 32, 4, 32, 32


def addresses(expression, size):
    """The first byte that each lane reads."""
    function = eval("lambda lane: " + expression, {"random": random.randrange})
    return [size * function(lane) for lane in range(LANES)]


def sectors(first_bytes, size):
    return len({first // SECTOR for first in first_bytes} | {(first + size - 1) // SECTOR for first in first_bytes})


def words_of_banks(first_bytes, size):
    """For each bank, the different words in it that these lanes want."""
    banks = [set() for _ in range(BANKS)]
    for first in first_bytes:
        for word in range(first // WORD, (first + size - 1) // WORD + 1):
            banks[word % BANKS].add(word)
    return banks


def clocks(first_bytes, size):
    """A clock answers one word of each bank. 128 bytes are the most: lanes with 8 bytes are served by halves of the
    warp, lanes with 16 by quarters."""
    at_once = min(LANES, BANKS * WORD // size)
    turns = [first_bytes[i : i + at_once] for i in range(0, LANES, at_once)]
    return sum(max(len(words) for words in words_of_banks(turn, size)) for turn in turns)


def drawing(first_bytes, size):
    """A line for each bank that is used: the words in it, and the lanes that want them."""
    lines = []
    for bank, words in enumerate(words_of_banks(first_bytes, size)):
        parts = []
        for word in sorted(words):
            lanes = [n for n, first in enumerate(first_bytes) if first // WORD <= word <= (first + size - 1) // WORD]
            parts.append(f"word {word}: lane {' '.join(map(str, lanes))}")
        if parts:
            lines.append(f"  bank {bank:2}   " + "   ".join(parts))
    return "\n".join(lines)


def print_mean(expression, size):
    """Of 1,000 accesses that are drawn, the mean numbers of sectors and clocks."""
    random.seed(1)
    drawn = [addresses(expression, size) for _ in range(1000)]
    print(f"mean of {len(drawn)} warps: {sum(sectors(first_bytes, size) for first_bytes in drawn) / len(drawn):.1f} sectors, "
          f"{sum(clocks(first_bytes, size) for first_bytes in drawn) / len(drawn):.1f} clocks")


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a reader such as head may stop reading
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("index", help="the element that a lane reads, such as \"33 * lane\"")
    parser.add_argument("--bytes", type=int, default=4, choices=[1, 2, 4, 8, 16], help="of an element")
    arguments = parser.parse_args()
    if "random(" in arguments.index:
        print_mean(arguments.index, arguments.bytes)
        parser.exit()
    first_bytes = addresses(arguments.index, arguments.bytes)
    print(f"if the array lies in memory: {sectors(first_bytes, arguments.bytes)} sectors of {SECTOR} bytes")
    turns = clocks(first_bytes, arguments.bytes)
    print(f"if it lies in shared memory: {turns} clock{'s' if turns > 1 else ''}, and these banks")
    print(drawing(first_bytes, arguments.bytes))
