"""check_layouts.py - checks the functions of layouts.py, which says what each of them has to do."""
import sys

from banks import BANKS, LANES, WORD, clocks, sectors


class Wrong(Exception):
    """What the reader is told of a function."""


def require(holds, *words):
    if not holds:
        raise Wrong("".join(map(str, words)))


def once_each(wanted, what):
    """wanted: {who: what he has}. Everything is to be had by somebody, and nothing by two."""
    owners = {}
    for who, has in wanted.items():
        require(has not in owners, owners.get(has), " and ", who, " both have ", what(has))
        owners[has] = who


def pair(name, value, first_limit, second_limit, multiple):
    """A pair of numbers, the second of which is the first of `multiple` neighbours."""
    require(isinstance(value, tuple) and len(value) == 2 and all(isinstance(n, int) for n in value),
            name, " returns ", value, ": two integers are wanted")
    require(0 <= value[0] < first_limit and 0 <= value[1] < second_limit, name, " returns ", value,
            ", which is outside")
    require(value[1] % multiple == 0, name, " returns ", value, ": ", value[1], " is no multiple of ", multiple)
    return value


def number(name, value, limit, multiple=1):
    require(isinstance(value, int), name, " returns ", value, ": an integer is wanted")
    require(0 <= value < limit, name, " returns ", value, ", which is outside 0 to ", limit - 1)
    require(value % multiple == 0, name, " returns ", value, ", which is no multiple of ", multiple)
    return value


def one_clock(first_bytes, size, what):
    """Names two lanes that need different words of one bank, if there are any."""
    if clocks(first_bytes, size) == 1:
        return
    lane_of = {}
    for lane, first in enumerate(first_bytes):
        word = first // WORD
        other = lane_of.setdefault(word % BANKS, (lane, word))
        require(other[1] == word, what, " takes ", clocks(first_bytes, size), " clocks: for instance lanes ", other[0],
                " and ", lane, " need words ", other[1], " and ", word, ", both in bank ", word % BANKS)


def few_sectors(first_bytes, size, least, what):
    wants = sectors(first_bytes, size)
    require(wants == least, what, " wants ", wants, " sectors, where ", least, " are enough")


def check_tile_byte(tile_byte):
    place = {f"({row}, {column})": number(f"tile_byte({row}, {column})", tile_byte(row, column), 2048)
             for row in range(32) for column in range(32)}
    once_each(place, lambda byte: f"byte {byte}")
    for fixed in range(32):
        one_clock([tile_byte(fixed, lane) for lane in range(LANES)], 1, f"writing row {fixed}")
        one_clock([tile_byte(lane, fixed) for lane in range(LANES)], 1, f"reading column {fixed}")


def check_chunks(function, name, row_length, size, least):
    """Of chunk_loaded and chunk_stored: a chunk is 8 neighbours along rows of memory with row_length elements."""
    chunks = {f"thread {thread} in step {step}":
              pair(f"{name}({thread}, {step})", function(thread, step), 64, 64, 8)
              for step in range(2) for thread in range(256)}
    once_each(chunks, lambda chunk: f"the eight elements that begin at {chunk}")
    for step in range(2):
        for warp in range(256 // LANES):
            places = [function(warp * LANES + lane, step) for lane in range(LANES)]
            first_bytes = [size * (line * row_length + first) for line, first in places]
            few_sectors(first_bytes, 8 * size, least, f"step {step} of warp {warp}")


def check_slot(slot):
    for across in range(16):
        slots = {f"word {word}": number(f"slot({word}, {across})", slot(word, across), 32) for word in range(32)}
        once_each(slots, lambda s: f"slot {s} where across is {across}")
        for word in range(32):
            first = word // 4 * 4  # of the piece
            here, there = slot(word, across), slot(first, across)
            require(here // 4 == there // 4,
                    f"words {first} and {word} of a piece have slots {there} and {here} where across is {across}")
    for warp in range(8):
        threads = [(thread % 16, thread // 16) for thread in range(warp * LANES, (warp + 1) * LANES)]  # (across, down)
        for lower in range(2):
            # A column has 32 words, and a thread's first column is number 8 across.
            one_clock([WORD * (32 * 8 * across + slot(2 * down + lower, across)) for across, down in threads], WORD,
                      f"storing the {'lower' if lower else 'upper'} words of warp {warp}")


def check_first_element(first_element):
    firsts = {f"lane {lane}": number(f"first_element({lane})", first_element(lane), 256, 8) for lane in range(LANES)}
    once_each(firsts, lambda first: f"the eight elements that begin at {first}")
    for half in range(2):
        spans = {first_element(16 * half + lane) // 128 for lane in range(16)}
        require(len(spans) == 1, f"lanes {16 * half} to {16 * half + 15} have elements of both spans")
    few_sectors([2 * first_element(lane) for lane in range(LANES)], 16, 16, "a load of weights")
    few_sectors([first_element(lane) for lane in range(LANES)], 8, 8, "a load of codes")


def check_partner(partner):
    for largest in range(LANES):  # this lane has 2, the other half of the warp 3 each, and all other lanes 1
        numbers = [3 if lane // 16 != largest // 16 else 2 if lane == largest else 1 for lane in range(LANES)]
        for turn in range(4):
            others = [number(f"partner({lane}, {turn})", partner(lane, turn), LANES) for lane in range(LANES)]
            numbers = [max(own, numbers[other]) for own, other in zip(numbers, others)]
        for lane in range(largest // 16 * 16, largest // 16 * 16 + 16):
            require(numbers[lane] >= 2, f"lane {lane} never learns of the number of lane {largest}")
            require(numbers[lane] == 2, f"lane {lane} has a number of the other half of the warp")


def check_field_of_lane(field_of_lane):
    fields = {f"lane {lane}": pair(f"field_of_lane({lane})", field_of_lane(lane), 8, 4, 1) for lane in range(LANES)}
    once_each(fields, lambda field: f"field {field[1]} of span {field[0]}")
    for lane in range(LANES):
        span = field_of_lane(lane)[0]
        require(span % 2 == lane // 16, f"lane {lane} has a field of span {span}, which the other half updates")


def check_first_number(first_number):
    for query in range(LANES // 4):
        lanes = range(4 * query, 4 * query + 4)
        firsts = {f"lane {lane} in load {load}": number(f"first_number({lane}, {load})", first_number(lane, load), 128, 8)
                  for lane in lanes for load in range(4)}
        once_each(firsts, lambda first: f"the eight numbers that begin at {first}")
    for load in range(4):
        first_bytes = [2 * first_number(lane, load) for lane in range(LANES)]
        few_sectors(first_bytes, 16, 2, f"load {load}")
        require(clocks(first_bytes, 16) == 4, f"load {load} takes {clocks(first_bytes, 16)} clocks of shared memory")


CHECKS = {  # the functions that are checked together, and how
    ("tile_byte",): check_tile_byte,
    ("chunk_loaded",): lambda function: check_chunks(function, "chunk_loaded", 4096, 2, 16),
    ("chunk_stored",): lambda function: check_chunks(function, "chunk_stored", 16384, 1, 8),
    ("slot",): check_slot,
    ("first_element",): check_first_element,
    ("partner",): check_partner,
    ("field_of_lane",): check_field_of_lane,
    ("first_number",): check_first_number,
}


def check(answers):
    """Prints a line for each function of `answers`, and ends the program with 1 if one of them is wrong."""
    wrong = False
    for names, checks in CHECKS.items():
        functions = [getattr(answers, name) for name in names]
        said = "passed"
        try:
            if any(function(*[0] * function.__code__.co_argcount) is None for function in functions):
                said = "not written yet"
            else:
                checks(*functions)
        except Wrong as error:
            said = f"wrong: {error}"
        except Exception as error:  # of the reader's function
            said = f"wrong: it raises {type(error).__name__}: {error}"
        wrong = wrong or said.startswith("wrong")
        print(f"{' and '.join(names)}: {said}")
    sys.exit(wrong)
