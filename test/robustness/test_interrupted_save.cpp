// test_interrupted_save.cpp - saving a checkpoint while the disk is full or the process is killed. A good
// checkpoint exists at every moment.
#include <doctest/doctest.h>

#include <csignal>
#include <sys/resource.h>
#include <sys/wait.h>

#include "../model_files.h"

using namespace coat;
using namespace coat::test;
using namespace coat::test::model_files;

TEST_CASE("checkpoint: a folder that cannot be written is an error, and nothing is lost") {
    Folder folder;
    MemoryModel model(small_setup(LLAMA), 1);
    write_file(folder / "file", "x");
    check_error([&] { save_checkpoint(folder / "file", model, some_state(1)); }, folder / "file",
                  "--out");
    CHECK(read_file(folder / "file") == "x");
    check_error([&] { find_checkpoint(folder / "none"); }, folder / "none");
    check_error([&] { find_checkpoint(folder.path.string()); }, folder.path.string());
}

TEST_CASE("checkpoint: a full disk leaves no partial checkpoint and keeps the previous one") {
    Folder folder;
    const std::string out = folder / "out";
    MemoryModel model(small_setup(LLAMA), 1), loaded(small_setup(LLAMA), 2);
    const std::string first = save_checkpoint(out, model, some_state(1));
    const auto bytes = static_cast<rlim_t>(fs::file_size(first + "/optimizer.safetensors"));
    // A limit on the size of a file stands for a full disk. Each limit stops the save at another place.
    for (rlim_t limit : {rlim_t{0}, rlim_t{100}, rlim_t{5000}, bytes - 1}) {
        rlimit before{};
        getrlimit(RLIMIT_FSIZE, &before);
        const auto handler = std::signal(SIGXFSZ, SIG_IGN);
        const rlimit tight{limit, before.rlim_max};
        setrlimit(RLIMIT_FSIZE, &tight);
        const std::string error = error_of([&] { save_checkpoint(out, model, some_state(2)); });
        setrlimit(RLIMIT_FSIZE, &before);
        std::signal(SIGXFSZ, handler);
        check_error(error, out + "/step-000002.tmp/", "--out");
        CHECK(!fs::exists(out + "/step-000002"));
        CHECK(!fs::exists(out + "/step-000002.tmp"));
        CHECK(find_checkpoint(out) == first);
    }
    load_checkpoint(first, loaded);
    CHECK(loaded.tensors() == model.tensors());
}

namespace {

// Saves for ever. A model's bits follow from its step. Each step is saved twice, so that a kill can also
// strike while a checkpoint is replaced.
[[noreturn]] void save_from(int64_t step, const std::string& out, const Setup& setup) {
    for (;; step++) {
        MemoryModel model(setup, static_cast<uint64_t>(step));
        for (int twice = 0; twice < 2; twice++) save_checkpoint(out, model, some_state(step));
    }
}

}  // namespace

TEST_CASE("checkpoint: a kill at any moment of a save leaves the last good checkpoint") {
    Folder folder;
    const std::string out = folder / "out";
    const Setup setup = small_setup(LLAMA);
    MemoryModel first(setup, 1), loaded(setup, 0);
    save_checkpoint(out, first, some_state(1));
    Random random(run_seed());
    int64_t last = 1, torn = 0;  // the newest step seen; kills in the middle of a save
    for (int64_t i = 0; i < count(60, 15); i++) {
        const pid_t child = fork();
        REQUIRE(child >= 0);
        if (!child) save_from(last + 1, out, setup);
        // Longer and longer: a busy machine is slow.
        usleep(static_cast<useconds_t>(1000 + random.bits() % static_cast<uint64_t>(30000 + 2000 * i)));
        kill(child, SIGKILL);
        int status = 0;
        waitpid(child, &status, 0);
        REQUIRE(WIFSIGNALED(status));
        for (const auto& entry : fs::directory_iterator(out)) torn += contains(entry.path().string(), ".tmp");
        const std::string found = find_checkpoint(out);
        const LoopState state = read_loop_state(found);
        REQUIRE(state.step >= last);  // the checkpoint seen before, or a newer one
        last = state.step;
        load_checkpoint(found, loaded);
        REQUIRE(loaded.tensors() == MemoryModel(setup, static_cast<uint64_t>(last)).tensors());
        REQUIRE(state.tokens == some_state(last).tokens);
    }
    CHECK(torn > 0);
    CHECK(last > 1);
    save_checkpoint(out, first, some_state(last + 1));
    const auto left = fs::directory_iterator(out);  // files that the kills left are removed
    CHECK(std::distance(begin(left), end(left)) == 1);
}

// The moment between two renames is so short that kills rarely strike it. A process that is stopped and
// continued can be examined thousands of times: the disk then holds what a kill would leave.
TEST_CASE("checkpoint: while the only checkpoint is replaced, a good one exists at every moment") {
    Folder folder;
    const std::string out = folder / "out";
    const Setup setup = small_setup(LLAMA);
    MemoryModel model(setup, 1);
    save_checkpoint(out, model, some_state(1));
    const pid_t child = fork();
    REQUIRE(child >= 0);
    if (!child)
        for (;;) save_checkpoint(out, model, some_state(1));
    Random random(run_seed());
    int64_t missing = 0, replacing = 0;
    for (int64_t i = 0; i < count(3000, 500); i++) {
        usleep(static_cast<useconds_t>(random.bits() % 500));
        kill(child, SIGSTOP);
        int status = 0;
        waitpid(child, &status, WUNTRACED);
        replacing += fs::exists(out + "/step-000001.old");
        missing += !error_of([&] { find_checkpoint(out); }).empty();
        kill(child, SIGCONT);
    }
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
    CHECK(missing == 0);
    CHECK(replacing > 0);
}
