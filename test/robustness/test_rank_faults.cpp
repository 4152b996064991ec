// test_rank_faults.cpp - faults of one rank of several: killed, interrupted, a full disk, other flags or
// data, a port in use. All ranks end within seconds, the user sees one sentence, and the last good checkpoint
// stays.
#include <doctest/doctest.h>

#include <chrono>

#include "../../data/checkpoint.h"
#include "../ports.h"
#include "../help/program.h"

using namespace coat;
using namespace coat::test;

TEST_CASE("ranks: of two runs on one port the second ends with one sentence, and the first goes on") {
    RunFolder folder;
    const int port = free_port();
    const std::string flags = TINY + "--steps 12 --eval-every 0 --out '' ";
    char listens[32];
    std::snprintf(listens, sizeof listens, "0100007F:%04X .* 0A ", port);
    const Ended ended =
        shell(folder, rank_by_hand(0, 2, port, flags) + "until grep -q '" + listens +
                          "' /proc/net/tcp; do kill -0 $pid0 || exit 78; sleep 0.02; done\n"
                          "COAT_PORT=" + std::to_string(port) + " RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 '" +
                          program() + "' " + flags + "; second=$?\n" + rank_by_hand(1, 2, port, flags) +
                          "wait $pid0 && wait $pid1 || exit 77; cat err0 err1 >&2; exit $second");
    check_one_sentence(ended, "Port " + std::to_string(port) + " is in use");
    CHECK(contains(read_file(folder.path / "out0"), "Done: 12 steps"));
}
