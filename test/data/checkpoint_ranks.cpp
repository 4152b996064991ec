// checkpoint_ranks.cpp - checkpoints of several ranks: the files do not tell how many there were, so a
// run continues on another number of ranks with the same bits.
#include <doctest/doctest.h>

#include "../help/program.h"
#include "../help/several_ranks.h"

using namespace coat;
using namespace coat::test;
using namespace coat::test::several_ranks;

namespace {

Setup setup_of(const std::string& recipe, const Architecture& arch, int64_t accumulate) {
    Setup s = tiny_setup(tiny_config(arch, false), recipe, optimizer_of(recipe), 2, 16);
    s.accumulate = accumulate;
    return s;
}

}  // namespace

TEST_CASE("checkpoint: several ranks write the files of one rank, and others continue with the same bits") {
    // One or two micro-batches at a time would be added in BF16 by recipe coat.
    check_checkpoints(setup_of("fp32", LLAMA, 12), 4, 3, make_reference);
    check_checkpoints(setup_of("coat", GPT2, 12), 2, 2, make_reference);
    check_checkpoints(setup_of("fp32", QWEN2, 12), 4, 3, make_reference);
}
