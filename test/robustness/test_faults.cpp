// test_faults.cpp - faults during a run of ./train: readers of its output that end, signals, files that
// change, locks, full disks. No run loses its checkpoint.
#include <doctest/doctest.h>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <set>

#include "../../data/checkpoint.h"
#include "../program.h"
#include "../token_files.h"

using namespace coat;
using namespace coat::test;
using coat::test::token_files::token_file;

namespace {

using Names = std::set<std::string>;

Names names_in(const fs::path& folder) {
    Names names;
    for (const auto& entry : fs::directory_iterator(folder)) names.insert(entry.path().filename().string());
    return names;
}

// Runs ./train with these flags. When a line of its output contains `part` for the first time, the shell runs
// `action`, in which $pid is the process of the run.
Ended run_with_action(const Folder& folder, const std::string& flags, const std::string& part,
                      const std::string& action) {
    return shell(folder, "mkfifo pipe; '" + program() + "' " + flags + " > pipe & pid=$!; done=\n"
                         "while read -r line; do echo \"$line\"; [ -n \"$done\" ] ||\n"
                         "case $line in *'" + part + "'*) done=yes; " + action + ";; esac; done < pipe\n"
                         "rm pipe; wait $pid");
}

std::string run_of(const fs::path& checkpoint) {
    return nlohmann::json::parse(read_file(checkpoint / "trainer.json")).at("run").get<std::string>();
}

}  // namespace

TEST_CASE("train: a run continues when the reader of its output ends") {
    RunFolder folder;
    shell(folder, "'" + program() + "'" + TINY + "--steps 24 --out out | head -n 1");
    REQUIRE(fs::exists(folder.path / "out"));
    CHECK(names_in(folder.path / "out") == Names{"step-000024"});
}

TEST_CASE("train: a run continues without its log when the log's reader ends") {
    RunFolder folder;
    const Ended ended = shell(folder, "mkfifo pipe; head -n 2 pipe > /dev/null & sleep 0.2; '" + program() +
                                          "'" + TINY + "--steps 24 --out out --log pipe > /dev/null");
    CHECK(ended.code == 0);
    CHECK(contains(ended.error, "train: --log pipe cannot be written any more"));
    CHECK(names_in(folder.path / "out") == Names{"step-000024"});
}

TEST_CASE("train: a --log pipe without a reader is rejected without waiting") {
    RunFolder folder;
    check_one_sentence(shell(folder, "mkfifo pipe; timeout -s KILL 20 '" + program() + "'" + TINY +
                                         "--steps 2 --out '' --log pipe > /dev/null"),
                       "--log pipe");
}

TEST_CASE("train: a signal ends an evaluation") {
    RunFolder folder;
    const Ended ended =
        shell(folder, "'" + program() +
                          "' --device cpu --data text --steps 0 --batch 16 --seq 256 > printed & pid=$!\n"
                          "until grep -q 'saved activations' printed; do kill -0 $pid || exit 78; "
                          "sleep 0.02; done\n"
                          "sleep 0.3; kill -TERM $pid; wait $pid");
    CHECK(ended.code == 143);
    CHECK(!contains(read_file(folder.path / "printed"), "validation | step 0 | loss"));
}

TEST_CASE("train: a run that is interrupted while steps are skipped keeps the last good checkpoint") {
    RunFolder folder;
    const std::string wild =
        "--lr 10 --weight-decay 10 --schedule constant --warmup 0 --steps 100 --eval-every 0 --save-every 2 "
        "--out wild";
    const Ended ended = run_with_action(folder, TINY + wild, "skipped: not finite", "kill -INT $pid");
    REQUIRE_MESSAGE(ended.code != 1, "the run ended before it was interrupted");
    CHECK(ended.code == 130);
    const size_t last = ended.out.rfind("saved | step ");
    REQUIRE(last != std::string::npos);
    CHECK(last < ended.out.find("skipped: not finite"));
    CHECK(contains(ended.out, "not saved: step "));
    const int64_t step = std::strtoll(ended.out.c_str() + last + 13, nullptr, 10);
    CHECK(read_loop_state(find_checkpoint(folder / "wild")).step == step);
}

TEST_CASE("train: an interrupted run without a checkpoint saves one, even if its last step was skipped") {
    RunFolder folder;
    const std::string wild =
        "--lr 10 --weight-decay 10 --schedule constant --warmup 0 --steps 100 --eval-every 0 --out wild";
    const Ended ended = run_with_action(folder, TINY + wild, "skipped: not finite", "kill -INT $pid");
    REQUIRE_MESSAGE(ended.code != 1, "the run ended before it was interrupted");
    CHECK(names_in(folder.path / "wild").size() == 1);
}

TEST_CASE("train: the checkpoint with the best validation loss is kept beside the last") {
    RunFolder folder;
    const Ended ended = tiny(folder,
                             "--lr 2 --schedule constant --warmup 30 --steps 30 --save-every 5 --eval-every "
                             "0 --out out --log log");
    require_success(ended);
    std::vector<std::pair<double, int64_t>> validations;  // (loss, step) of the saved steps
    for (const auto& line : logged(folder, "validation"))
        if (line.at("step") != 0) validations.push_back({line.at("loss"), line.at("step")});
    REQUIRE(validations.size() == 6);  // each is validated before it is saved
    const auto best = *std::min_element(validations.begin(), validations.end());
    REQUIRE(best.second < 30);
    REQUIRE(best.first < validations.back().first - 0.1);
    char name[32];
    std::snprintf(name, sizeof name, "step-%06lld", static_cast<long long>(best.second));
    CHECK(names_in(folder.path / "out") == Names{name, "step-000030"});
    CHECK(read_loop_state((folder.path / "out" / name).string()).validation == best.first);
}

TEST_CASE("train: a resumed run keeps its name and removes no checkpoint of another run") {
    RunFolder folder;
    require_success(tiny(folder, "--schedule constant --steps 2 --out a"));
    require_success(tiny(folder, "--schedule constant --steps 3 --out b"));
    const std::string name = run_of(folder.path / "a/step-000002");
    CHECK(name.size() == 16);
    CHECK(name != run_of(folder.path / "b/step-000003"));
    fs::create_directory(folder.path / "kept");
    fs::copy(folder.path / "a/step-000002", folder.path / "kept/mine", fs::copy_options::recursive);
    fs::copy(folder.path / "b/step-000003", folder.path / "kept/step-000003", fs::copy_options::recursive);
    const std::string other = weights_and_state(folder.path / "kept/step-000003");
    require_success(train(folder, "--device cpu --resume kept/mine --steps 5 --save-every 4"));
    CHECK(names_in(folder.path / "kept") == Names{"mine", "step-000003", "step-000005"});
    CHECK(weights_and_state(folder.path / "kept/step-000003") == other);
    CHECK(run_of(folder.path / "kept/step-000005") == name);
    // This is the step of the other run's checkpoint.
    require_success(train(folder, "--device cpu --resume kept/mine --steps 3"));
    CHECK(run_of(folder.path / "kept/step-000003") == name);
    CHECK(weights_and_state(folder.path / "kept/step-000003.other") == other);
}

TEST_CASE("train: a folder is locked before data are read, and a rejected run leaves no folder") {
    RunFolder folder;
    fs::create_directory(folder.path / "taken");
    const int taken = ::open((folder.path / "taken").c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    REQUIRE(::flock(taken, LOCK_EX | LOCK_NB) == 0);
    check_rejected(folder, "--device cpu --data nowhere --steps 2 --out taken",
                  "--out taken is the folder of another run");
    ::close(taken);
    check_rejected(folder, "--device cpu --data nowhere --steps 2 --out taken", "--data nowhere");
    CHECK(fs::exists(folder.path / "taken"));
    check_rejected(folder, "--device cpu --data nowhere --steps 2 --out new", "--data nowhere");
    CHECK(!fs::exists(folder.path / "new"));
}

TEST_CASE("train: a checkpoint that cannot be read is skipped with one sentence, and an older one is used") {
    RunFolder folder;
    require_success(tiny(folder, "--schedule constant --steps 3 --out good"));
    const auto make = [&](const std::string& what) {
        const fs::path out = folder.path / "out", bad = out / "step-000005";
        fs::remove_all(out);
        fs::copy(folder.path / "good", out, fs::copy_options::recursive);
        if (what == "a file") write_file(bad, "");
        else if (what == "a loop") fs::create_symlink("step-000005", bad);
        else fs::copy(out / "step-000003", bad, fs::copy_options::recursive);
        if (what == "a looping file")
            fs::remove(bad / "config.json"), fs::create_symlink("config.json", bad / "config.json");
        if (what == "no state") write_file(bad / "trainer.json", "");
        if (what == "half of the weights")
            fs::resize_file(bad / "model.safetensors", fs::file_size(bad / "model.safetensors") / 2);
    };
    for (const char* what : {"a file", "a loop", "a looping file", "no state", "half of the weights"}) {
        CAPTURE(what);
        make(what);
        const Ended begun = tiny(folder, "--steps 9 --save-every 4 --out out");
        CHECK(begun.code == 1);
        CHECK(contains(begun.error, "step-000005 cannot be read"));
        CHECK(contains(begun.error, "already holds the checkpoint out/step-000003"));
        const Ended resumed = train(folder, "--device cpu --resume out --steps 6 --save-every 5");
        CAPTURE(resumed.error);
        CHECK(resumed.code == 0);
        CHECK(contains(resumed.error, "train: out/step-000005 cannot be read"));
        CHECK(std::count(resumed.error.begin(), resumed.error.end(), '\n') == 1);
        CHECK(contains(resumed.out, "set aside | "));
        CHECK(contains(resumed.out, "/out/step-000005.other\n"));
        CHECK(names_in(folder.path / "out") == Names{"step-000005.other", "step-000006"});
    }
}

TEST_CASE("train: when its data become shorter a run saves and ends, and resumes once they are complete") {
    RunFolder folder;
    const std::string text = read_file(folder.path / "text");  // bytes as tokens of 16 bits
    folder.write("text.bin", token_file(std::vector<uint16_t>(text.begin(), text.end())));
    const std::string flags =
        "--device cpu --data text.bin --batch 2 --seq 16 --sample-every 0 --eval-every 0 ";
    fs::copy(folder.path / "text.bin", folder.path / "whole");
    const Ended ended = run_with_action(folder, flags + "--schedule constant --steps 100000 --out out",
                                        "step      3/", ": > text.bin");
    check_one_sentence(ended, "text.bin");
    REQUIRE(names_in(folder.path / "out").size() == 1);
    const int64_t step = read_loop_state(find_checkpoint(folder / "out")).step;
    CHECK(step >= 3);
    write_file(folder.path / "text.bin", read_file(folder.path / "whole"));
    require_success(train(folder, "--device cpu --resume out --steps " + std::to_string(step + 3)));
    require_success(train(
        folder, flags + "--schedule constant --steps " + std::to_string(step + 3) + " --out never-stopped"));
    char name[32];
    std::snprintf(name, sizeof name, "step-%06lld", static_cast<long long>(step + 3));
    for (const char* file : {"model.safetensors", "optimizer.safetensors"})
        CHECK((read_file(folder.path / "out" / name / file) ==
               read_file(folder.path / "never-stopped" / name / file)));
}

TEST_CASE("train: when the data are overwritten by tokens beyond the vocabulary the run saves and says so") {
    RunFolder folder;
    const std::string text = read_file(folder.path / "text");
    folder.write("text.bin", token_file(std::vector<uint16_t>(text.begin(), text.end())));
    const std::string flags =
        "--device cpu --data text.bin --batch 2 --seq 16 --sample-every 0 --eval-every 0 ";
    const std::string overwrite =
        "head -c 2000000 /dev/zero | tr '\\0' '\\377' | dd of=text.bin bs=1024 seek=1 conv=notrunc 2>dd";
    const Ended ended =
        run_with_action(folder, flags + "--steps 100000 --out out", "step      3/", overwrite);
    check_one_sentence(ended, "text.bin was overwritten");
    REQUIRE(names_in(folder.path / "out").size() == 1);
    CHECK(read_loop_state(find_checkpoint(folder / "out")).step >= 3);
}

TEST_CASE("train: a run works where no other thread can be started") {
    RunFolder folder;
    const bool root = geteuid() == 0;  // limits do not apply to root
    const std::string path = program();
    fs::permissions(folder.path, fs::perms::all);
    const pid_t child = fork();
    REQUIRE(child >= 0);
    if (!child) {
        const int printed = ::open((folder.path / "printed").c_str(), O_WRONLY | O_CREAT, 0666);
        ::dup2(printed, 1);
        ::dup2(printed, 2);
        ::setenv("OMP_NUM_THREADS", "1", 1);
        ::setenv("OMP_WAIT_POLICY", "passive", 1);  // without it the program starts itself again
        ::setenv("ASAN_OPTIONS", "detect_leaks=0", 1);  // the leak check of make sanitize needs a thread
        const rlimit none{0, 0};
        if (::chdir(folder.path.c_str()) || (root && ::setuid(65534)) || ::access(path.c_str(), X_OK))
            _exit(99);
        ::setrlimit(RLIMIT_NPROC, &none);
        ::execl(path.c_str(), "train", "--device", "cpu", "--data", "text", "--batch", "2", "--seq", "16",
                "--sample-every", "0", "--steps", "6", "--out", "out", nullptr);
        _exit(99);
    }
    int status = 0;
    waitpid(child, &status, 0);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 99) {
        MESSAGE("the program cannot be started by a user without rights");
        return;
    }
    CAPTURE(read_file(folder.path / "printed"));
    CHECK(WIFEXITED(status));
    CHECK(WEXITSTATUS(status) == 0);
    CHECK(fs::exists(folder.path / "out/step-000006"));
}

TEST_CASE("train: a disk that is too small for the checkpoints of a run is rejected before training") {
    RunFolder folder;
    require_success(tiny(folder, "--steps 1 --out one"));
    int64_t bytes = 0;
    for (const auto& entry : fs::directory_iterator(folder.path / "one/step-000001"))
        bytes += int64_t(entry.file_size());
    fs::create_directory(folder.path / "disk");
    // The disk has room for 2.5 checkpoints.
    const std::string mounted =
        "unshare -m$map sh -c 'mount -t tmpfs -o size=" + std::to_string(bytes * 5 / 2) +
        " tmpfs disk && ";
    const std::string run = program() + TINY;
    const auto on_disk = [&](const std::string& command) {
        return shell(folder, "map=; unshare -m true 2> printed || map=r; " + mounted + command + "'");
    };
    if (on_disk("true").code != 0) {
        MESSAGE("this user cannot mount a file system");
        return;
    }
    check_one_sentence(on_disk(run + "--steps 30 --save-every 2 --out disk/out"), "--out disk/out has ");
    CHECK(on_disk(run + "--steps 3 --save-every 2 --out disk/out").code == 0);
    CHECK(on_disk(run + "--steps 2 --out disk/out && " + program() +
                  " --device cpu --resume disk/out --steps 3")
              .code == 0);
    check_one_sentence(on_disk(run + "--steps 2 --out disk/out && " + program() +
                               " --device cpu --resume disk/out --steps 9 --save-every 2"),
                       "disk/out has ");
}
