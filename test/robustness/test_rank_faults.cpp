// test_rank_faults.cpp - faults of one rank of several: killed, interrupted, a full disk, other flags or
// data, a port in use. All ranks end within seconds, the user sees one sentence, and the last good checkpoint
// stays.
#include <doctest/doctest.h>

#include <chrono>

#include "../../data/checkpoint.h"
#include "../ports.h"
#include "../program.h"

using namespace coat;
using namespace coat::test;

namespace {

// Runs ./train with these flags. When a line of its output contains `part` for the first time, the shell runs
// `action`, in which $pid is rank 0 and $others are the processes that it has started; the file "others" has
// them, too. Waits at most two seconds for these after rank 0 has ended.
Ended run_with_action(const Folder& folder, const std::string& flags, const std::string& part,
                      const std::string& action) {
    fs::remove(folder.path / "others");
    return shell(folder, "mkfifo pipe; '" + program() + "' " + flags + " > pipe & pid=$!; done=\n"
                         "while read -r line; do echo \"$line\"; [ -n \"$done\" ] ||\n"
                         "case $line in *'" + part + "'*) done=yes\n"
                         "others=$(echo $(cat /proc/$pid/task/$pid/children))\n"
                         "echo $others > others; " + action + ";; esac; done < pipe\n"
                         "rm pipe; wait $pid; code=$?; n=0\n"
                         "for p in $others; do while kill -0 $p 2> gone && [ $n -lt 100 ]; do\n"
                         "sleep 0.02; n=$((n + 1)); done; done; exit $code");
}

// Whether no process that the run has started is left.
bool others_ended(const Folder& folder) {
    std::istringstream others(read_file(folder.path / "others"));
    int found = 0, left = 0;
    for (pid_t pid; others >> pid; found++) left += ::kill(pid, 0) == 0;
    return found > 0 && left == 0;
}

struct Clock {
    std::chrono::steady_clock::time_point begin = std::chrono::steady_clock::now();
    double seconds() const {
        return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    }
};

const std::string RUN =
    TINY + "--ranks 3 --schedule constant --eval-every 0 --save-every 2 --out out ";

int64_t last_step(const Folder& folder) { return read_loop_state(find_checkpoint(folder / "out")).step; }

// The run in "out" goes on from its last checkpoint.
void check_resumes(const Folder& folder) {
    const std::string steps = std::to_string(last_step(folder) + 1);
    require_success(train(folder, "--device cpu --resume out --save-every 0 --steps " + steps));
}

// Starts one rank by hand, in the background; its error goes to a file of its name.
std::string rank_by_hand(int rank, int ranks, int port, const std::string& flags) {
    const std::string n = std::to_string(rank);
    return "COAT_PORT=" + std::to_string(port) + " RANK=" + n + " LOCAL_RANK=" + n + " WORLD_SIZE=" +
           std::to_string(ranks) + " MASTER_ADDR=127.0.0.1 '" + program() + "' " + flags + " > out" + n +
           " 2> err" + n + " & pid" + n + "=$!\n";
}
// Waits for these two ranks, prints what they said, and returns the exit code of rank 0.
const std::string WAIT_FOR_TWO = "wait $pid1; other=$?; wait $pid0; code=$?; cat err0 err1 >&2\n"
                                 "[ $code = $other ] || exit 77; exit $code";

}  // namespace

TEST_CASE("ranks: if a rank is killed all end within seconds, and the run resumes from its last checkpoint") {
    for (const std::string victim : {"${others%% *}", "$pid"}) {
        CAPTURE(victim);
        RunFolder folder;
        const Clock clock;
        const Ended ended =
            run_with_action(folder, RUN + "--steps 300", "saved | step 4 ", "kill -KILL " + victim);
        CHECK(clock.seconds() < 20);
        CHECK(others_ended(folder));
        if (victim == "$pid") CHECK(ended.code == 137);
        else check_one_sentence(ended, "Rank 1 has ended unexpectedly");
        CHECK(std::count(ended.error.begin(), ended.error.end(), '\n') <= 2);  // the shell says "Killed"
        CHECK(contains(ended.error, victim == "$pid" ? "Rank 0 has ended" : "Rank 1 has ended"));
        check_resumes(folder);
    }
}

TEST_CASE("ranks: a signal to one rank or to all stops all after the same step, and saves") {
    for (const std::string to : {"$pid", "${others##* }", "$pid $others"}) {
        CAPTURE(to);
        RunFolder folder;
        const Ended ended = run_with_action(folder, RUN + "--steps 300", "step   3/", "kill -INT " + to);
        CAPTURE(ended.error);
        CHECK(ended.code == 130);
        CHECK(ended.error == "");
        CHECK(others_ended(folder));
        CHECK(contains(ended.out, "--resume out"));
        CHECK(last_step(folder) >= 3);
        check_resumes(folder);
    }
}

TEST_CASE("ranks: a full disk ends all, and the last good checkpoint stays") {
    RunFolder folder;
    require_success(train(folder, RUN + "--steps 2"));
    // A limit on the size of a file stands for a full disk.
    const Clock clock;
    const Ended ended = shell(folder, "ulimit -f 100; '" + program() +
                                          "' --device cpu --resume out --ranks 3 --accumulate 1 --steps 6");
    CHECK(clock.seconds() < 20);
    check_one_sentence(ended, "out/step-");
    CHECK(last_step(folder) == 2);
    for (const auto& entry : fs::directory_iterator(folder.path / "out"))
        CHECK(entry.path().filename() == "step-000002");
    check_resumes(folder);
}

TEST_CASE("ranks: flags that are wrong on all ranks give one sentence, and no file is left") {
    RunFolder folder;
    folder.write("other", text_of_lines() + "x");
    for (const auto& [flags, who] : {std::pair<std::string, std::string>{"--data nowhere", "--data nowhere"},
                                     {"--data text --bacth 2", "--batch"},
                                     {"--data text --seq 4096", "--seq 4096"},
                                     {"--data text --resume nowhere", "nowhere"},
                                     {"--data text --optimizer fp8lm", "--optimizer fp8lm"}}) {
        const Clock clock;
        check_rejected(folder, "--device cpu --steps 2 --ranks 2 " + flags, who);
        CHECK(clock.seconds() < 20);
    }
}

TEST_CASE("ranks: the memory for all ranks of a host is checked, also if a launcher has started them") {
    RunFolder folder;
    // 2 GiB for the batches of a rank: 1001 ranks need more than any machine has.
    const std::string flags = "--device cpu --data text --batch 32 --seq 16 --accumulate 524288 "
                              "--sample-every 0 --steps 1 --out ''";
    const int port = free_port();
    std::string other = rank_by_hand(1, 2, port, flags);
    other.replace(other.find("LOCAL_RANK=1"), 12, "LOCAL_RANK=1000");
    const std::string limit = "ulimit -t 20\n";  // seconds
    check_one_sentence(shell(folder, limit + rank_by_hand(0, 2, port, flags) + other + WAIT_FOR_TWO),
                       "Rank 1: This run needs");
}

TEST_CASE("ranks: a rank that is started by hand with other flags, other data or a wrong flag ends all") {
    RunFolder folder;
    folder.write("other", text_of_lines() + "x");
    const std::string base = "--device cpu --batch 2 --seq 16 --sample-every 0 --steps 2 --out '' ",
                      good = base + "--data text ";
    const std::pair<std::string, std::string> cases[] = {
        {good + "--lr 1", "Rank 1 was started with --lr \"1\", but rank 0 with \"3e-3\""},
        {good + "--bacth 4", "Rank 1: --bacth is not a flag"},
        {TINY + "--steps 3 --out ''", "--steps \"3\""}};
    for (const auto& [flags, says] : cases) {
        CAPTURE(flags);
        const Clock clock;
        const int port = free_port();
        check_one_sentence(shell(folder, rank_by_hand(0, 2, port, good) + rank_by_hand(1, 2, port, flags) +
                                             WAIT_FOR_TWO),
                           says);
        CHECK(clock.seconds() < 20);
    }
    const int port = free_port();
    const std::string same = base + "--data data";
    check_one_sentence(shell(folder, "mkdir a b; cp text a/data; cp other b/data; ln -s ../a/err1 b; cd a\n" +
                                         rank_by_hand(0, 2, port, same) + "cd ../b\n" +
                                         rank_by_hand(1, 2, port, same) + "cd ../a\n" + WAIT_FOR_TWO),
                       "Rank 1 reads other --data than rank 0");
}

TEST_CASE("ranks: started by hand, two ranks train like two of --ranks") {
    RunFolder folder;
    const int port = free_port();
    const std::string flags = TINY + "--steps 3 ";
    require_success(
        shell(folder, rank_by_hand(0, 2, port, flags) + rank_by_hand(1, 2, port, flags) + WAIT_FOR_TWO));
    CHECK(read_file(folder.path / "out1") == "");  // rank 0 alone prints
    require_success(train(folder, flags + "--ranks 2 --out started"));
    CHECK(weights_and_state(folder.path / "out/step-000003") ==
          weights_and_state(folder.path / "started/step-000003"));
}

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
