// test_damaged_files.cpp - safetensors files and checkpoints with random bytes changed or cut off. Each is
// read, or is an error that names the file.
#include <doctest/doctest.h>

#include <cstring>

#include "../model_files.h"

using namespace coat;
using namespace coat::test;
using namespace coat::test::model_files;

namespace {

// A few random changes to the first `end` bytes.
std::string damaged(std::string bytes, size_t end, Random& random) {
    static const std::string useful = "0123456789-.eE\"{}[],: abFBU\\\xFF";
    for (uint64_t n = random.bits() % 4 + 1; n-- && !bytes.empty();) {
        const size_t at = random.bits() % std::min(end, bytes.size());
        switch (random.bits() % 5) {
            case 0: bytes[at] = static_cast<char>(random.bits()); break;
            case 1: bytes[at] = useful[random.bits() % useful.size()]; break;
            case 2: bytes.resize(at); break;
            case 3: bytes.erase(at, 1 + random.bits() % 4); break;
            case 4: bytes.insert(at, 1, useful[random.bits() % useful.size()]); break;
        }
    }
    return bytes;
}

}  // namespace

TEST_CASE("Safetensors: a file with random changes or cuts is read or rejected") {
    Folder folder;
    const std::string path = folder / "fuzz.safetensors";
    const std::string good =
        raw_file(R"({"__metadata__":{"k":"v"},"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},)"
                 R"("b":{"dtype":"BF16","shape":[5],"data_offsets":[24,34]},)"
                 R"("c":{"dtype":"U8","shape":[],"data_offsets":[34,35]}})",
                 35);
    Random random(run_seed());
    int64_t rejected = 0, sum_of_bytes = 0;
    const int64_t tries = count(20000, 4000);
    for (int64_t i = 0; i < tries; i++) {
        write_file(path, damaged(good, good.size(), random));
        const std::string error = error_of([&] {
            const Safetensors file(path);
            for (const Tensor& t : file.tensors())  // every byte of a tensor can be read
                for (int64_t b = 0; b < t.bytes; b++) sum_of_bytes += t.data[b];
        });
        if (!error.empty()) rejected++;
        REQUIRE((error.empty() || contains(error, path)));
    }
    CHECK(rejected > tries / 2);
    CHECK(rejected < tries);
    CHECK(sum_of_bytes > 0);
}

TEST_CASE("checkpoint: a damaged one is an error that names the file") {
    Folder folder;
    MemoryModel saved(small_setup(LLAMA), 1), model(small_setup(LLAMA), 2);
    const std::string checkpoint = save_checkpoint(folder / "out", saved, some_state(5));
    for (const char* name : {"model.safetensors", "optimizer.safetensors", "config.json"}) {
        const std::string path = checkpoint + "/" + name, good = read_file(path);
        write_file(path, good.substr(0, good.size() / 2));
        check_error([&] { load_checkpoint(checkpoint, model); }, path);
        fs::remove(path);
        check_error([&] { load_checkpoint(checkpoint, model); }, checkpoint);
        check_error([&] { find_checkpoint(folder / "out"); }, folder / "out");
        write_file(path, good);
    }
    CHECK(model.writes() == 0);
    load_checkpoint(checkpoint, model);
    CHECK(model.tensors() == saved.tensors());
}

TEST_CASE("checkpoint: one with random changes or cuts is read or rejected") {
    Folder folder;
    MemoryModel saved(small_setup(GPT2), 1), model(small_setup(GPT2), 2);
    const std::string checkpoint = save_checkpoint(folder / "out", saved, some_state(5));
    Random random(run_seed());
    for (const char* name : {"config.json", "trainer.json", "model.safetensors", "optimizer.safetensors"}) {
        CAPTURE(name);
        const std::string path = checkpoint + "/" + name, good = read_file(path);
        uint64_t header = good.size();
        if (fs::path(name).extension() == ".safetensors") std::memcpy(&header, good.data(), sizeof header);
        int64_t rejected = 0;
        for (int64_t i = 0; i < count(500, 60); i++) {
            write_file(path, damaged(good, static_cast<size_t>(header), random));
            const std::string error = error_of([&] {
                read_loop_state(checkpoint);
                load_checkpoint(checkpoint, model);
            });
            if (!error.empty()) rejected++;
            REQUIRE((error.empty() || contains(error, checkpoint)));
        }
        CHECK(rejected > 0);
        write_file(path, good);
    }
    load_checkpoint(checkpoint, model);
    CHECK(model.tensors() == saved.tensors());
}
