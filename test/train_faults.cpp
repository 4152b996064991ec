// train_faults.cpp - faults during a run of ./train: signals, readers that end, full disks, data that change,
// weights that are not finite, killed ranks. The last good checkpoint stays; one sentence says what happened.
#include "help/program.h"

using namespace coat;
using namespace coat::test;

// The run in "out" goes on from its last checkpoint.
static void check_resumes(const Folder& folder, const std::string& flags = "") {
    const std::string steps = std::to_string(last_step(folder) + 1);
    require_success(train(folder, "--device cpu --resume out --save-every 0 --steps " + steps + flags));
}

// The names of the folders in this folder that begin with this text.
static std::vector<std::string> folders_of(const std::string& folder, const std::string& begin) {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(folder))
        if (entry.is_directory() && entry.path().filename().string().starts_with(begin))
            names.push_back(entry.path().filename().string());
    return names;
}

TEST_CASE(
    "train: a run goes on under nohup and when the reader of its output ends and without a log's disk") {
    RunFolder folder;
    const std::string run = "train" + TINY + "--steps 24 --out out";
    require_success(shell(folder, run + " | head -n 1 > first"));  // ends when both have ended
    CHECK(last_step(folder) == 24);
    const Ended log = shell(folder, "ulimit -f 1; train" + TINY + "--steps 24 --out '' --log log >/dev/null");
    CHECK(log.code == 0);
    CHECK(std::count(log.error.begin(), log.error.end(), '\n') == 1);
    CHECK(contains(log.error, "train: --log log cannot be written any more"));
    const Ended hangup = shell(folder, "trap '' HUP; train" + TINY + R"(--steps 60 --out '' > printed & pid=$!
await "grep -q 'step  2/' printed"
kill -HUP $pid; wait $pid)");
    CHECK(hangup.code == 0);
    CHECK(contains(read_file(folder / "printed"), "Done: 60 steps"));
}

TEST_CASE("train: a standard descriptor that is closed is not the log's or a checkpoint's") {
    for (const char* closed : {">&-", "2>&-", "<&-", ">&- 2>&- <&-"})
        for (const char* ranks : {"", "--ranks 2 "}) {
            INFO(std::string(closed), " ", std::string(ranks));
            RunFolder folder;
            const std::string run = "train" + TINY + "--steps 4 --save-every 2 --log log --out out ";
            require_success(shell(folder, run + ranks + closed));
            for (const std::string& line : lines_of(read_file(folder.path / "log")))
                CHECK(nlohmann::json::accept(line));
            CHECK(logged(folder, "step").size() == 4);
            const Ended failed = shell(folder, "train" + TINY + "--log log2 --data nowhere " + closed);
            CHECK(failed.code == 1);
            CHECK(read_file(folder.path / "log2").empty());
            check_resumes(folder, contains(ranks, "2") ? " --accumulate 2" : "");
        }
}

TEST_CASE("train: a run that diverges ends or is interrupted; its last good checkpoint stays") {
    for (const bool interrupted : {false, true})
        for (const bool saves : {true, false}) {
            INFO(interrupted, saves);
            RunFolder folder;
            const std::string wild = TINY + "--lr 1000 --weight-decay 1000 --warmup 0 --steps 200 --out out ";
            // 20 steps after the first skipped one the run ends by itself. So steps that are interrupted are
            // slow.
            const std::string size = interrupted ? "--batch 16 --seq 128 " : "";
            const Ended ended =
                run_with_action(folder, wild + size + "--eval-every 0" + (saves ? " --save-every 2" : ""),
                                "skipped: not finite", interrupted ? "kill -INT $pid" : ":");
            const size_t bad = ended.out.find("skipped: not finite"), last = ended.out.rfind("saved | step ");
            REQUIRE(bad != std::string::npos);
            CHECK((last == std::string::npos) == !(saves || interrupted));
            const std::string checkpoint = saves ? last_checkpoint(folder) : "";
            if (saves) CHECK((last < bad && ended.out.find(checkpoint, last) < bad));
            if (interrupted) CHECK(ended.code == 130);
            else check_one_sentence(ended, "or the clipped norm was 2^62 or more", checkpoint);
            if (saves && !interrupted)  // no step is saved
                check_one_sentence(train(folder, "--device cpu --resume out --out out"), "20 steps in a row",
                                   checkpoint);
        }
    {  // the last steps of a run are skipped: the last one is validated before it would be saved
        RunFolder folder;
        const Ended ended = tiny(folder,
                                 "--lr 1000 --weight-decay 1000 --warmup 0 --eval-every 0 --steps 20 "
                                 "--save-every 2 --keep 1 --out out");
        const size_t bad = ended.out.find("skipped: not finite"), last = ended.out.rfind("saved | step ");
        REQUIRE(bad != std::string::npos);
        REQUIRE(contains(ended.out.substr(bad), "step 20/20"));
        const std::string checkpoint = last_checkpoint(folder);
        CHECK(last < bad);
        CHECK(ended.out.find(checkpoint, last) < bad);
        check_one_sentence(ended, "not finite after step 20", checkpoint);
    }
    RunFolder folder;
    require_success(tiny(folder, "--steps 1 --out good"));
    fs::copy(folder.path / "good/step-000001", folder.path / "bad");
    std::string weights = read_file(folder.path / "bad/model.safetensors");
    for (const auto& [byte, says] : {std::pair{'\xFF', "bad has NaN"},        // BF16's NaN
                                     {'\x7F', "not finite after step 0"}}) {  // BF16's maximum
        std::fill(weights.end() - 2000, weights.end(), byte);
        write_file(folder.path / "bad/model.safetensors", weights);
        check_rejected(folder, TINY + "--steps 2 --out '' --model bad", says);
    }
}

TEST_CASE("train: two signals end a run after its step and a third ends it at once") {
    for (const int signals : {2, 3}) {
        CAPTURE(signals);
        RunFolder folder;
        std::string kill = "kill -INT $pid";
        for (int i = 1; i < signals; i++) kill += "; sleep 0.1; kill -INT $pid";
        // The first step takes seconds.
        const Ended ended = run_with_action(
            folder, TINY + "--batch 64 --seq 256 --accumulate 4 --eval-every 0 --steps 2 --out out",
            "validation | step 0", kill);
        CHECK(ended.code == 130);
        CHECK(contains(ended.out, "Interrupted after step 1") == (signals == 2));
    }
}

// The rows of a report, by the kind of tensor: "| 31.6 dB |  1024 | 0 | 0 (0.000%)".
static std::map<std::string, std::string> report_rows(const std::string& printed) {
    std::map<std::string, std::string> rows;
    for (const std::string& line : lines_of(printed))
        for (const char* kind : MEASURED_KIND_NAMES)
            if (line.starts_with(concat(kind, " "))) rows[kind] = line.substr(line.find('|'));
    return rows;
}

TEST_CASE("train: lines and reports call NaN not finite; NaN is not flushed and zeros have no error") {
    RunFolder folder;
    const Ended ended = tiny(folder, "--lr 1e4 --warmup 0 --steps 8 --eval-every 0 --save-every 1 --out out");
    CHECK(contains(ended.out, "norm not finite"));
    CHECK(!contains(ended.out, "nan"));
    auto rows = report_rows(ended.out);
    for (const char* kind : {"gradients", "first moments", "second moments"}) {
        INFO(rows[kind]);
        CHECK(contains(rows[kind], " not finite |"));
        CHECK(number_after(rows[kind].substr(rows[kind].rfind('|')), "|") == 0);  // flushed
    }
    CHECK(contains(rows["weights"], " dB |"));

    require_success(tiny(folder, "--steps 1 --out zeros"));
    const std::string file = folder.path / "zeros/step-000001/model.safetensors";
    std::string weights = read_file(file);
    uint64_t header = 0;  // its length stands in the first 8 bytes
    std::memcpy(&header, weights.data(), 8);
    std::fill(weights.begin() + 8 + int64_t(header), weights.end(), '\0');
    write_file(file, weights);
    const Ended zeros = tiny(folder, "--steps 0 --model zeros/step-000001");
    require_success(zeros);
    rows = report_rows(zeros.out);
    CHECK(contains(rows["weights"], " no error |"));
}

// For the shell: waits until ./train, whose standard error goes to the file "errors", has failed to save.
static const std::string UNTIL_A_SAVE_HAS_FAILED = R"(await "grep -q 'tries again' errors"; )";

// A checkpoint of the small model has files of more than 30 KiB. A limit on the size of a file, in KiB,
// stands for a full disk; no folder has room then. Once the last save has failed twice, the action follows.
TEST_CASE("train: a full disk in between is reported and training goes on; the last save is tried again") {
    RunFolder folder;
    require_success(tiny(folder, "--steps 2 --out out"));
    const auto before = folder.files();
    // Flags, the action, the exit code, and the steps that are not saved: the first and the last.
    const std::tuple<std::string, std::string, int, std::string, std::string> rows[] = {
        {"--device cpu --resume out --save-every 2 --steps 6", "kill -INT $pid", 130, "4", "6"},
        {TINY + "--ranks 3 --save-every 2 --steps 4 --out several", "kill -INT $pid", 130, "2", "4"},
        {"--device cpu --resume out --steps 6", "prlimit --fsize=unlimited: --pid $pid", 0, "6", "6"}};
    for (const auto& [flags, action, code, first, last] : rows) {
        CAPTURE(flags);
        const Ended ended =
            shell(folder, "mkdir tmp; ulimit -S -f 30; TMPDIR=tmp COAT_MINUTE=0.3 train " + flags +
                              " 2> errors & pid=$!\n"
                              "await '[ $(grep -c \"tries again\" errors) -ge 2 ]'\n" +
                              action + "; wait $pid; code=$?; rmdir tmp; exit $code");
        const std::string errors = read_file(folder.path / "errors");
        fs::remove(folder.path / "errors");
        CHECK(ended.code == code);
        CHECK(contains(errors, "train: Step " + first + " was not saved: Cannot write "));
        CHECK(contains(errors,
                       "train: The run tries again in a minute (2 of 10); after the last try, or Ctrl-C"));
        CHECK(contains(errors, "Step " + last + " is lost: no other folder") == (code != 0));
        CHECK(contains(ended.out, "step " + last + "/" + last));
        CHECK(contains(ended.out, "saved | step 6 | ") == (code == 0));
        CHECK(!fs::exists(folder.path / "tmp"));
        CHECK(folders_of(folder, "coat-").empty());
        if (code && contains(flags, "--resume")) CHECK(folder.files() == before);
    }
    CHECK(find_checkpoint(folder / "several").empty());
    // So it is after Ctrl-C. A second one ends the program after one more attempt.
    for (const std::string room : {"", "prlimit --fsize=unlimited: --pid $pid; "}) {
        const Ended twice =
            run_with_action(folder, "--device cpu --resume out --steps 100000 2> errors", "step      8/",
                            "prlimit --fsize=30000: --pid $pid; kill -INT $pid; " + UNTIL_A_SAVE_HAS_FAILED +
                                room + "kill -INT $pid");
        fs::remove(folder.path / "errors");
        CHECK(twice.code == 130);
        CHECK((last_step(folder) == 6) == room.empty());
    }
    check_resumes(folder);
}

// A file in the place of the folder --out stands for a disk that stays full, while others have room. 800
// lines of steps are more than a pipe holds (64 KiB): the run cannot end before the action, because the shell
// reads no further until that is done.
TEST_CASE("train: a run that can never write --out ends; its last step is saved in another folder") {
    for (const auto& [ranks, where, action, code] :
         {std::tuple{"", "tmp", std::string(), 1},
          {"--ranks 2", "tmp", "", 1},
          {"", ".", "rmdir tmp; ", 1},  // $TMPDIR is not there, either
          {"", "tmp", "kill -INT $pid; " + UNTIL_A_SAVE_HAS_FAILED + "kill -INT $pid; ", 130}}) {
        INFO(std::string(ranks), " ", std::string(where), " ", action);
        RunFolder folder;
        fs::create_directory(folder.path / "tmp");
        const bool interrupts = code == 130;  // then it need not try ten times
        const std::string minute = interrupts ? "60" : "0.01", steps = interrupts ? "100000" : "800";
        setenv("COAT_MINUTE", minute.c_str(), 1);
        setenv("TMPDIR", "tmp", 1);
        const Ended ended = run_with_action(
            folder, TINY + "--eval-every 0 --keep 1 --out out --steps " + steps + " " + ranks + " 2> errors",
            " 2/", "mv out away; : > out; " + action);
        unsetenv("COAT_MINUTE");
        unsetenv("TMPDIR");
        CHECK(ended.code == code);
        const std::string errors = read_file(folder.path / "errors");
        const std::vector<std::string> made = folders_of(folder / where, "coat-");
        REQUIRE(made.size() == 1);
        const std::string checkpoint = find_checkpoint(folder / where + "/" + made[0]);
        CHECK(contains(errors, "--out out could not be written; move "));
        CHECK(contains(errors, fs::path(checkpoint).filename().string() + " there when it can be."));
        CHECK((interrupts || contains(errors, "in a minute (10 of 10)")));
        CHECK((interrupts || contains(ended.out, "Done: 800 steps")));
        // After the advice was followed the run goes on.
        fs::remove(folder.path / "out");
        fs::create_directory(folder.path / "out");
        fs::rename(checkpoint, folder.path / "out" / fs::path(checkpoint).filename());
        check_resumes(folder, *ranks ? " --accumulate 2" : "");
    }
}

TEST_CASE("train: two runs do not share a folder; it is locked before data are read") {
    RunFolder folder;
    const std::string other = "train" + TINY + "--out taken ";
    const Ended first = run_with_action(
        folder, TINY + "--steps 100000 --out taken", "step      2/",
        other + "--data nowhere --steps 1 2> refused\n" + other + "--steps 0 > evaluated; kill -INT $pid");
    CHECK(first.code == 130);
    CHECK(contains(read_file(folder.path / "refused"), "train: --out taken is the folder of another run"));
    CHECK(contains(read_file(folder.path / "evaluated"), "validation | step 0"));  // it saves nothing
    check_rejected(folder, "--device cpu --resume taken --data nowhere", "Cannot read nowhere (No such file");
}

TEST_CASE("train: a folder that another run has made and filled in the meantime is not written to") {
    RunFolder folder;
    // The first run is held up in its first validation, which takes a second, before it makes --out.
    folder.write("long", std::string(200'000, 'x'));
    const Ended late = run_with_action(
        folder, TINY + "--steps 2 --val long --eval-tokens 100000 --out out", "checkpoints: in out",
        "kill -STOP $pid; train" + TINY + "--steps 1 --eval-every 0 --out out > other; kill -CONT $pid");
    check_one_sentence(late, "--out out already holds the checkpoint out/step-000001");
    CHECK(contains(read_file(folder.path / "other"), "Done: 1 step"));
    CHECK(last_checkpoint(folder) == "out/step-000001");
}

TEST_CASE("train: two runs do not write one log at the same time") {
    RunFolder folder;
    const std::string other = "train" + TINY + "--out '' --steps 1 ";
    const Ended first =
        run_with_action(folder, TINY + "--steps 100000 --out '' --log log", "step      2/",
                        other + "--log log 2> refused\n" + other + "--log /dev/null; kill -INT $pid");
    CHECK(first.code == 130);
    CHECK(contains(read_file(folder.path / "refused"),
                   "train: --log log is the log of another run that is going"));
    CHECK(logged(folder, "settings").size() == 1);
}

TEST_CASE("train: when its data are cut or overwritten all ranks save the last step and end") {
    for (const auto& [action, says] :
         {std::pair<std::string, std::string>{": > text.bin", "text.bin"},
          {"head -c 2000000 /dev/zero | tr '\\0' '\\377' | dd of=text.bin bs=1024 seek=1 conv=notrunc 2>dd",
           "--data was changed"}})
        for (const std::string ranks : {"--accumulate 2", "--ranks 2"}) {
            INFO(action, " ", ranks);
            RunFolder folder;
            const std::string text = read_file(folder / "text"),
                              whole = token_file(std::vector<uint16_t>(text.begin(), text.end())),
                              flags = TINY + ranks + " --data text.bin --eval-every 0 --steps 100000 ";
            folder.write("text.bin", whole);
            const Ended ended = run_with_action(folder, flags + "--out out", "step      3/", action);
            REQUIRE(!find_checkpoint(folder / "out").empty());
            const std::string last = last_checkpoint(folder), step = std::to_string(last_step(folder));
            CHECK(last_step(folder) >= 3);
            check_one_sentence(ended, says, last);
            folder.write("text.bin", whole);
            // The saved step is whole: it has the tensors that a run saves there whose data do not change.
            run_with_action(folder, flags + "--keep 9 --out other --save-every " + step,
                            "saved | step " + step, "kill -KILL $pid");
            const fs::path whole_run = folder.path / "other" / fs::path(last).filename();
            CHECK((tensors_of(folder / last) == tensors_of(whole_run)));
        }
}

TEST_CASE("ranks: a rank that is killed ends all; a signal to any stops all after the same step and saves") {
    for (const auto& [to, code] : {std::pair{"-KILL ${others%% *}", 1},
                                   {"-KILL $pid", 137},
                                   {"-INT $pid", 130},
                                   {"-INT ${others##* }", 130},
                                   {"-INT $pid $others", 130}}) {
        CAPTURE(to);
        RunFolder folder;
        const std::string flags = TINY + "--eval-every 0 --save-every 2 --out out --ranks 3 --steps 3000";
        const Ended ended = run_with_action(folder, flags, "saved | step 4 ", std::string("kill ") + to);
        CHECK(ended.code == code);
        if (code == 1) check_one_sentence(ended, "Rank 1 has ended unexpectedly", last_checkpoint(folder));
        if (code == 137) CHECK(contains(ended.error, "Rank 0 has ended"));
        if (code == 130) CHECK((ended.error.empty() && contains(ended.out, "--resume out")));
        CHECK(last_step(folder) >= 4);
        CHECK(last_step(folder) < 3000);
        check_resumes(folder, " --accumulate 3");
    }
}
