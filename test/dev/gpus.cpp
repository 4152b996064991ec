// gpus.cpp - dev/README.md: its tables of GPUs are those that dev/evidence/gpus.cpp makes; and an old CUDA.
#include "../help/program.h"

#define main write_tables
#include "../../dev/evidence/gpus.cpp"
#undef main

using namespace coat::test;

TEST_CASE("dev/README.md: which recipe runs how on a compute capability, and which model fits in a GPU") {
    const std::string page = read_file("dev/README.md");
    CHECK(contains(page, recipes_by_capability()));
    if (knows_gpus()) CHECK(contains(page, models_by_gpu()));
}

TEST_CASE("Makefile: an nvcc that is too old ends make in one sentence, before anything is compiled") {
    const Folder folder;
    const std::string make = "make -n -C '" + fs::current_path().string() + "' NVCC=$PWD/nvcc train";
    for (const auto& [release, good] :
         {std::pair{"12.4", false}, {"9.2", false}, {"12.9", true}, {"13.0", true}}) {
        folder.write("nvcc",
                     std::string("#!/bin/sh\necho 'Cuda compilation tools, release ") + release + ", V1'\n");
        const Ended ended = shell(folder, "chmod +x nvcc; unset MAKELEVEL MAKEFLAGS; " + make);
        CAPTURE(ended.error);
        CHECK((ended.code == 0) == good);
        CHECK(contains(ended.error, "needs CUDA 12.9 or newer: install a newer toolkit") == !good);
    }
}
