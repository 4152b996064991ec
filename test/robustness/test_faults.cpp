// test_faults.cpp - faults around a run: readers of its output that leave, signals, files that change, locks. No
// run's checkpoint is lost.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/resource.h>

#include "../../data/checkpoint.h"
#include "../../plan.h"
#include "../../reference.h"
#include "../program.h"

using namespace coat;
using namespace coat::test;

namespace {

namespace fs = std::filesystem;
using Names = std::set<std::string>;

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

Names names_in(const fs::path& folder) {
    Names names;
    for (const auto& entry : fs::directory_iterator(folder)) names.insert(entry.path().filename().string());
    return names;
}

std::vector<nlohmann::json> logged(const Folder& folder, const std::string& kind) {
    std::vector<nlohmann::json> lines;
    std::istringstream log(read_file(folder.path / "log"));
    for (std::string line; std::getline(log, line);)
        if (auto parsed = nlohmann::json::parse(line); parsed.at("kind") == kind) lines.push_back(parsed);
    return lines;
}

// Runs with these flags; when a line of the output contains `part` for the first time, the shell runs `action` ($pid is the run's).
Ended acting(const Folder& folder, const std::string& flags, const std::string& part, const std::string& action) {
    return shell(folder, "mkfifo pipe; '" + program() + "' " + flags + " > pipe & pid=$!; acted=\n"
                         "while read -r line; do echo \"$line\"; [ -n \"$acted\" ] ||\n"
                         "case $line in *'" + part + "'*) acted=yes; " + action + ";; esac; done < pipe\n"
                         "rm pipe; wait $pid");
}

std::string run_of(const fs::path& checkpoint) {
    return nlohmann::json::parse(read_file(checkpoint / "trainer.json")).at("run").get<std::string>();
}

// Bytes as uint16 tokens
void write_tokens(const Folder& folder, const std::string& name) {
    const std::string text = read_file(folder.path / "text");
    write_file(folder.path / name, token_file(20240520, uint32_t(text.size()), std::vector<uint16_t>(text.begin(), text.end())));
}

}  // namespace

TEST_CASE("train: a run continues when the reader of its output ends") {
    Folder folder;
    shell(folder, "'" + program() + "'" + TINY + "--steps 24 --out out | head -n 1");
    REQUIRE(fs::exists(folder.path / "out"));
    CHECK(names_in(folder.path / "out") == Names{"step-000024"});
}

TEST_CASE("train: a run continues without its log when the log's reader ends") {
    Folder folder;
    const Ended ended = shell(folder, "mkfifo pipe; head -n 2 pipe > /dev/null & sleep 0.2; '" + program() + "'" + TINY +
                                          "--steps 24 --out out --log pipe > /dev/null");
    CHECK(ended.code == 0);
    CHECK(contains(ended.error, "train: --log pipe cannot be written any more"));
    CHECK(names_in(folder.path / "out") == Names{"step-000024"});
}

TEST_CASE("train: a --log pipe without a reader is rejected without waiting") {
    Folder folder;
    check_one_sentence(shell(folder, "mkfifo pipe; timeout -s KILL 20 '" + program() + "'" + TINY + "--steps 2 --out '' --log pipe > /dev/null"),
                       "--log pipe");
}

TEST_CASE("train: a signal ends an evaluation") {
    Folder folder;
    const Ended ended = shell(folder, "'" + program() + "' --device cpu --data text --steps 0 --batch 16 --seq 256 > told & pid=$!\n"
                                      "until grep -q 'saved activations' told; do sleep 0.02; done; sleep 0.3; kill -TERM $pid; wait $pid");
    CHECK(ended.code == 143);
    CHECK(!contains(read_file(folder.path / "told"), "validation | step 0 | loss"));
}

TEST_CASE("train: a run that is interrupted while steps are skipped keeps the last good checkpoint") {
    Folder folder;
    const std::string wild = "--lr 10 --weight-decay 10 --schedule constant --warmup 0 --steps 100 --eval-every 0 --save-every 2 --out wild";
    const Ended ended = acting(folder, TINY + wild, "skipped: not finite", "kill -INT $pid");
    REQUIRE_MESSAGE(ended.code != 1, "the run ended before it was interrupted");
    CHECK(ended.code == 130);
    const size_t last = ended.out.rfind("saved | step ");
    REQUIRE(last != std::string::npos);
    CHECK(last < ended.out.find("skipped: not finite"));
    CHECK(contains(ended.out, "not saved: step "));
    const int64_t step = std::strtoll(ended.out.c_str() + last + 13, nullptr, 10);
    CHECK(read_loop_state(find_checkpoint((folder.path / "wild").string())).step == step);
}

TEST_CASE("train: an interrupted run without an older checkpoint saves one, even if its last step was skipped") {
    Folder folder;
    const std::string wild = "--lr 10 --weight-decay 10 --schedule constant --warmup 0 --steps 100 --eval-every 0 --out wild";
    const Ended ended = acting(folder, TINY + wild, "skipped: not finite", "kill -INT $pid");
    REQUIRE_MESSAGE(ended.code != 1, "the run ended before it was interrupted");
    CHECK(names_in(folder.path / "wild").size() == 1);
}

TEST_CASE("train: the checkpoint with the best validation loss is kept beside the last") {
    Folder folder;
    const Ended ended = tiny(folder, "--lr 2 --schedule constant --warmup 30 --steps 30 --save-every 5 --eval-every 0 --out out --log log");
    require_success(ended);
    std::vector<std::pair<double, int64_t>> validations;  // of the saved steps
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
    Folder folder;
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
    require_success(train(folder, "--device cpu --resume kept/mine --steps 3"));  // the step that the other run's checkpoint has
    CHECK(run_of(folder.path / "kept/step-000003") == name);
    CHECK(weights_and_state(folder.path / "kept/step-000003.other") == other);
}

TEST_CASE("train: a folder is locked before checkpoints or data are read, and a rejected run leaves no folder") {
    Folder folder;
    fs::create_directory(folder.path / "taken");
    const int taken = ::open((folder.path / "taken").c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    REQUIRE(::flock(taken, LOCK_EX | LOCK_NB) == 0);
    check_refused(folder, "--device cpu --data nowhere --steps 2 --out taken", "--out taken is the folder of another run");
    ::close(taken);
    check_refused(folder, "--device cpu --data nowhere --steps 2 --out taken", "--data nowhere");
    CHECK(fs::exists(folder.path / "taken"));
    check_refused(folder, "--device cpu --data nowhere --steps 2 --out new", "--data nowhere");
    CHECK(!fs::exists(folder.path / "new"));
}

TEST_CASE("train: a checkpoint that cannot be read is skipped with one sentence, and older ones are still found") {
    Folder folder;
    require_success(tiny(folder, "--schedule constant --steps 3 --out good"));
    const auto make = [&](const std::string& what) {
        const fs::path out = folder.path / "out", bad = out / "step-000005";
        fs::remove_all(out);
        fs::copy(folder.path / "good", out, fs::copy_options::recursive);
        if (what == "a file") write_file(bad, "");
        else if (what == "a loop") fs::create_symlink("step-000005", bad);
        else fs::copy(out / "step-000003", bad, fs::copy_options::recursive);
        if (what == "a looping file") fs::remove(bad / "config.json"), fs::create_symlink("config.json", bad / "config.json");
        if (what == "no state") write_file(bad / "trainer.json", "");
        if (what == "half of the weights") fs::resize_file(bad / "model.safetensors", fs::file_size(bad / "model.safetensors") / 2);
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
        CHECK(names_in(folder.path / "out") == Names{"step-000005.other", "step-000006"});
    }
}

TEST_CASE("train: when the data become shorter the run saves and says so, and resumes once they are complete") {
    Folder folder;
    write_tokens(folder, "text.bin");
    const std::string flags = "--device cpu --data text.bin --batch 2 --seq 16 --sample-every 0 --eval-every 0 ";
    fs::copy(folder.path / "text.bin", folder.path / "whole");
    const Ended ended = acting(folder, flags + "--schedule constant --steps 100000 --out out", "step      3/", ": > text.bin");
    check_one_sentence(ended, "text.bin");
    REQUIRE(names_in(folder.path / "out").size() == 1);
    const int64_t step = read_loop_state(find_checkpoint((folder.path / "out").string())).step;
    CHECK(step >= 3);
    write_file(folder.path / "text.bin", read_file(folder.path / "whole"));
    require_success(train(folder, "--device cpu --resume out --steps " + std::to_string(step + 3)));
    require_success(train(folder, flags + "--schedule constant --steps " + std::to_string(step + 3) + " --out never-stopped"));
    char name[32];
    std::snprintf(name, sizeof name, "step-%06lld", static_cast<long long>(step + 3));
    for (const char* file : {"model.safetensors", "optimizer.safetensors"})
        CHECK((read_file(folder.path / "out" / name / file) == read_file(folder.path / "never-stopped" / name / file)));
}

TEST_CASE("train: when the data are overwritten by tokens beyond the vocabulary the run saves and says so") {
    Folder folder;
    write_tokens(folder, "text.bin");
    const std::string flags = "--device cpu --data text.bin --batch 2 --seq 16 --sample-every 0 --eval-every 0 ";
    const std::string overwrite =
        "head -c 2000000 /dev/zero | tr '\\0' '\\377' | dd of=text.bin bs=1024 seek=1 conv=notrunc 2>dd";
    const Ended ended = acting(folder, flags + "--steps 100000 --out out", "step      3/", overwrite);
    check_one_sentence(ended, "text.bin was overwritten");
    REQUIRE(names_in(folder.path / "out").size() == 1);
    CHECK(read_loop_state(find_checkpoint((folder.path / "out").string())).step >= 3);
}

TEST_CASE("train: a run works where no other thread can be started") {
    Folder folder;
    const bool root = geteuid() == 0;  // whom no limit holds
    const std::string path = program();
    fs::permissions(folder.path, fs::perms::all);
    const pid_t child = fork();
    REQUIRE(child >= 0);
    if (!child) {
        const int told = ::open((folder.path / "told").c_str(), O_WRONLY | O_CREAT, 0666);
        ::dup2(told, 1);
        ::dup2(told, 2);
        ::setenv("OMP_NUM_THREADS", "1", 1);
        ::setenv("OMP_WAIT_POLICY", "passive", 1);  // else it starts itself again
        const rlimit none{0, 0};
        if (::chdir(folder.path.c_str()) || (root && ::setuid(65534)) || ::access(path.c_str(), X_OK)) _exit(99);
        ::setrlimit(RLIMIT_NPROC, &none);
        ::execl(path.c_str(), "train", "--device", "cpu", "--data", "text", "--batch", "2", "--seq", "16", "--sample-every", "0", "--steps", "6",
                "--out", "out", nullptr);
        _exit(99);
    }
    int status = 0;
    waitpid(child, &status, 0);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 99) {
        MESSAGE("the program cannot be started by a user without rights");
        return;
    }
    CAPTURE(read_file(folder.path / "told"));
    CHECK(WIFEXITED(status));
    CHECK(WEXITSTATUS(status) == 0);
    CHECK(fs::exists(folder.path / "out/step-000006"));
}

TEST_CASE("train: a disk that is too small for the checkpoints kept at one time is rejected before training") {
    Folder folder;
    require_success(tiny(folder, "--steps 1 --out one"));
    int64_t bytes = 0;
    for (const auto& entry : fs::directory_iterator(folder.path / "one/step-000001")) bytes += int64_t(entry.file_size());
    fs::create_directory(folder.path / "disk");
    const std::string mounted = "unshare -m$map sh -c 'mount -t tmpfs -o size=" + std::to_string(bytes * 5 / 2) + " tmpfs disk && ";  // for two and a half
    const std::string run = program() + TINY;
    const auto on_disk = [&](const std::string& command) { return shell(folder, "map=; unshare -m true 2> told || map=r; " + mounted + command + "'"); };
    if (on_disk("true").code != 0) {
        MESSAGE("this user cannot mount a file system");
        return;
    }
    check_one_sentence(on_disk(run + "--steps 30 --save-every 2 --out disk/out"), "--out disk/out has ");
    CHECK(on_disk(run + "--steps 3 --save-every 2 --out disk/out").code == 0);
    CHECK(on_disk(run + "--steps 2 --out disk/out && " + program() + " --device cpu --resume disk/out --steps 3").code == 0);
    check_one_sentence(on_disk(run + "--steps 2 --out disk/out && " + program() + " --device cpu --resume disk/out --steps 9 --save-every 2"),
                       "disk/out has ");
}

namespace {

// Of layer 0 one channel of the feed-forward block overflows where the token is '~', and is zero elsewhere.
void write_fragile(Model& model) {
    const ModelConfig& c = model.setup().config;
    for (const Param& p : parameters(c)) {
        std::vector<uint16_t> w(static_cast<size_t>(p.size()));
        model.read(p.name, w.data());
        auto at = [&](int64_t row, int64_t col) -> uint16_t& { return w[static_cast<size_t>(row * p.cols + col)]; };
        if (p.name == "embedding")
            for (int64_t token = 0; token < p.rows; token++) at(token, 0) = token == '~' ? reference::to_bf16(1.0f) : 0;
        if (p.name == "layers.0.attention_out" || p.name == "layers.0.down")
            for (int64_t col = 0; col < p.cols; col++) at(0, col) = 0;
        if (p.name == "layers.0.gate_up") {
            std::fill(w.begin(), w.end(), uint16_t{0});
            at(0, 0) = at(c.F, 0) = reference::to_bf16(0x1p64f);
        }
        model.write(p.name, w.data());
    }
}

}  // namespace

TEST_CASE("train: bias correction counts updates, not steps") {
    Setup setup{find_row(models(), "llama-tiny", ""), find_row(recipes(), "fp32", ""), find_row(optimizers(), "fp32", ""), 2, 16};
    setup.config.V = 256, setup.config.tied = false;
    const std::unique_ptr<Model> model = make_reference(setup);
    write_fragile(*model);
    Folder folder;
    std::string text = read_file(folder.path / "text");
    for (size_t at = 0; at < text.size() * 4 / 5; at += 32) text[at] = '~';  // none where the validation reads
    write_file(folder.path / "text", text);
    const std::string start = save_checkpoint((folder.path / "start").string(), *model, {});
    const std::string flags = "--recipe fp32 --schedule constant --warmup 0 --lr 1e-6 --weight-decay 0 --eval-every 0 --model '" + start + "' ";
    tiny(folder, flags + "--steps 15 --out '' --log log");  // whatever becomes of it
    int64_t first = 0;  // the first step that is an update
    for (const auto& line : logged(folder, "step"))
        if (!first && !line.at("skipped").get<bool>()) first = line.at("step");
    REQUIRE(first > 1);
    require_success(tiny(folder, flags + "--out out --steps " + std::to_string(first)));
    const std::string checkpoint = find_checkpoint((folder.path / "out").string());
    CHECK(read_loop_state(checkpoint).step == first);
    CHECK(read_loop_state(checkpoint).updates == 1);

    auto masters = [&](const Param& p) {
        std::vector<uint16_t> weight(static_cast<size_t>(p.size()));
        std::vector<int16_t> remainder(weight.size());
        model->read(p.name, weight.data());
        model->read(p.name + ".remainder", remainder.data());
        std::vector<float> values;
        for (size_t i = 0; i < weight.size(); i++) values.push_back(reference::join_master(weight[i], remainder[i]));
        return values;
    };
    const std::vector<Param> params = parameters(setup.config);
    const auto down = std::find_if(params.begin(), params.end(), [](const Param& p) { return p.name == "layers.3.down"; });
    REQUIRE(down != params.end());
    load_weights(start, *model);  // as the run does: without the remainders that the first weights had
    const std::vector<float> before = masters(*down);
    load_checkpoint(checkpoint, *model);
    const std::vector<float> after = masters(*down);
    std::vector<double> moved;
    for (size_t i = 0; i < before.size(); i++) moved.push_back(std::fabs(double(after[i]) - before[i]));
    std::nth_element(moved.begin(), moved.begin() + std::ptrdiff_t(moved.size() / 2), moved.end());
    CHECK(moved[moved.size() / 2] / 1e-6 == doctest::Approx(1).epsilon(0.01));  // a first update moves by the learning rate: m / sqrt(v) is 1
}
