// gpus.cpp - dev/README.md: its tables of GPUs are those that dev/evidence/gpus.cpp makes.
#include "../help/files.h"

#define main write_tables
#include "../../dev/evidence/gpus.cpp"
#undef main

TEST_CASE("dev/README.md: which recipe runs how on a compute capability, and which model fits in a GPU") {
    const std::string page = coat::test::read_file("dev/README.md");
    const bool built_for_gpus = arena_bytes({models()[0], recipes()[0], optimizers()[0], 1, 16}, false) > 0;
    CHECK(coat::test::contains(page, recipes_by_capability()));
    if (built_for_gpus) CHECK(coat::test::contains(page, models_by_gpu()));
}
