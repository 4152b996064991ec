"""layouts.py - which thread touches which bytes: functions to write, which are checked without a GPU.

    python3 dev/ladders/layouts.py

Write each function in place of `return None`. What it has to return stands in it, and the rung that asks the same.
The check says what is wrong: an element that nobody loads, or one that two threads load; how many sectors an access
wants; which lanes meet in a bank. Any function that passes is right. In a kernel it is the same expression in C++,
with / in place of //. A warp is 32 threads that follow each other; README.md explains sectors and banks.
"""

# --- quantize_transpose.cu


def tile_byte(row, column):
    """Rung 4. A tile of 32 x 32 codes of a byte is in shared memory. Return the byte in which the code (row, column)
    is. A warp writes a row, a lane for each column; later a warp reads a column, a lane for each row. Each is to take
    1 clock. The tile may take up to 2,048 bytes. (Rung 4's own padding does not pass: most columns take 2 clocks
    there. Find a better one.)"""
    return None


def chunk_loaded(thread, step):
    """Rung 5. 256 threads load a tile of 64 x 64 BF16 elements in 2 steps. A thread loads 8 neighbours of a row, 16
    bytes, with one instruction. Return (row, the first of its columns): where thread 0 to 255 begins in step 0 or 1.
    The tile is a part of a matrix with 4,096 columns. A warp's load is to want no more sectors than its 512 bytes
    have: 16."""
    return None


def chunk_stored(thread, step):
    """Rung 5, second half. The same threads store the codes of the tile transposed, a byte each: 8 rows of a column, in
    2 steps. Return (column, the first of its rows). Rows of the result, which are the columns of the tile, have 16,384
    bytes. A warp's store is to want no more sectors than its 256 bytes have: 8."""
    return None


def slot(word, across):
    """Rung 7. Write it after you have read rung 6, and before rung 7, whose text has an answer. The columns of a tile
    have 32 words, four rows each, in shared memory. Thread (across, down) of 16 x 16 has words 2 down (its upper word)
    and 2 down + 1 (its lower word) of eight columns. Four words that follow each other are a piece: words 0 to 3 are
    piece 0. Return the slot of a word, 0 to 31, in a column whose threads have this `across`. One thread reads the four
    words of a piece at once, so they are to be in four slots that follow each other, the first of which is a multiple
    of 4; their order is up to you. With one instruction the threads of a warp store an upper word each, and with
    another one a lower word each. Each of these is to take 1 clock."""
    return None


# --- adamw.cu


def first_element(lane):
    """Rung 5. A warp has two spans of 128 elements, which follow each other. A lane has 8 neighbours. Return the first
    of them, 0 to 255. Each half of the warp is to have one span. A load of weights (2 bytes each) is to want 16
    sectors, a load of codes (a byte each) 8."""
    return None


def partner(lane, round):
    """Rung 5. Each lane has a number. In round 0, 1, 2 and 3 it gets, by a shuffle, the number that another lane has at
    this time, and keeps the larger one. Return that other lane. After the four rounds every lane is to have the largest
    number of its own half of the warp."""
    return None


def field_of_lane(lane):
    """Rung 8. A warp takes eight spans: its lower half (lanes 0 to 15) updates spans 0, 2, 4 and 6, its upper half
    spans 1, 3, 5 and 7. A span has four fields: 0 is m.max, 1 is m.k, 2 is v.max, 3 is v.k. Each lane loads one of
    the 32, of a span that its own half updates. Return (span, field)."""
    return None


# --- attention.cu


def first_number(lane, load):
    """Rung 4. Four neighbouring lanes share a query: lanes 0 to 3, lanes 4 to 7, and so on. All read the same key, 128
    BF16 numbers: each lane of the four loads a quarter, in loads 0 to 3 of 8 numbers. Return the first number of a load.
    In one load a warp is to want 2 sectors of memory, and 4 clocks of shared memory."""
    return None


if __name__ == "__main__":
    import sys

    import check_layouts

    check_layouts.check(sys.modules[__name__])
