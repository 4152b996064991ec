// checkpoint.cpp - data/checkpoint.cpp: a checkpoint is read back bit for bit; one that is damaged or of
// another run is an error before the model changes; a complete one exists at every moment, also after a kill.
#include <doctest/doctest.h>

#include <csignal>
#include <set>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include "../../program/plan.h"
#include "../help/checkpoints.h"
#include "../help/program.h"

using namespace coat;
using namespace coat::test;

// The calls of fsync and rename, which are replaced below: "sync PATH", "rename PATH". That in `fails` fails.
static std::vector<std::string> calls;
static std::string fails;

extern "C" int fsync(int file) {
    std::error_code ignored;
    const std::string path = fs::read_symlink("/proc/self/fd/" + std::to_string(file), ignored).string();
    calls.push_back("sync " + path);
    if (calls.back() != fails) return int(syscall(SYS_fsync, file));
    errno = EIO;
    return -1;
}
extern "C" int rename(const char* from, const char* to) noexcept {
    calls.push_back(std::string("rename ") + from);
    if (calls.back() != fails) return int(syscall(SYS_rename, from, to));
    errno = EBUSY;
    return -1;
}

using Names = std::set<std::string>;
static Names names_in(const std::string& folder) {
    Names found;
    for (const auto& entry : fs::directory_iterator(folder)) found.insert(entry.path().filename().string());
    return found;
}

namespace {

// A saved checkpoint to damage, and a model that must stay as it is.
struct Damage {
    Folder folder;
    MemoryModel saved{small_settings(LLAMA), 1}, loaded{small_settings(LLAMA), 2};
    const std::string path = save(folder / "out", saved, 5);
    void load() {
        require_whole(path);
        read_saved_run(path);
        load_checkpoint(path, loaded);
    }
    void rejected(const std::string& file, const std::string& bytes, const std::string& says) {
        const std::string good = read_file(path + "/" + file);
        write_file(path + "/" + file, bytes);
        const int writes = loaded.writes;
        CAPTURE(file);
        check_error([&] { load(); }, path, says);
        CHECK(loaded.writes == writes);
        write_file(path + "/" + file, good);
    }
};

}  // namespace

TEST_CASE("checkpoint: what is read back and saved again has the same bytes with every optimizer and mode") {
    std::vector<std::pair<Architecture, const char*>> rows;
    for (const Architecture& arch : {LLAMA, MISTRAL, QWEN2, QWEN3, GPT2}) rows.push_back({arch, "coat"});
    for (const OptimizerFormats& optimizer : optimizers()) rows.push_back({LLAMA, optimizer.name});
    for (const auto& [arch, optimizer] : rows)
        for (const bool master : {true, false}) {
            INFO(std::string(arch.name), " ", std::string(optimizer), " ", master);
            Folder folder;
            RunSettings s = small_settings(arch, master, optimizer);
            s.keep_masters = master;
            if (!master) s.recipe = find_row(recipes(), "te", "");  // with delayed scales
            if (arch.rope && master)
                s.config.head_size = 16, s.config.rope_scaling = {RopeScaling::Llama3, 8.1f, 1.1f, 4.1f, 77};
            MemoryModel saved(s, 1);
            const std::string out = folder / "out", path = save(out, saved, 300);
            CHECK((path == out + "/step-000300" && find_checkpoint(out) == path));
            CHECK(find_checkpoint(path) == path);
            s.config = read_model_config(path);
            MemoryModel loaded(s, 2);
            load_checkpoint(path, loaded);
            CHECK(saved.tensors == loaded.tensors);
            const auto again = save_checkpoint(folder / "again", loaded, read_saved_run(path));
            CHECK((files_below(path) == files_below(again) && files_below(path).size() == 4));
            // PyTorch reads tensors whose elements are aligned.
            const Safetensors file(path + "/optimizer.state");
            for (const StateTensor& t : tensors_besides_weights(s))
                CHECK(uintptr_t(file.tensors().at(t.name).data) % size_t(t.bytes) == 0);
        }
}

TEST_CASE("checkpoint: one of another recipe or optimizer or shape is rejected before the model changes") {
    Damage d;
    RunSettings te = small_settings(LLAMA), deeper = te, larger = te;
    te.recipe = find_row(recipes(), "te", "");  // has delayed scales
    deeper.config.L = 3, larger.config.V = 51;
    for (const RunSettings& other :
         {te, deeper, larger, small_settings(GPT2), small_settings(LLAMA, false),
          small_settings(LLAMA, true, "bf16"), small_settings(LLAMA, true, "fp32")}) {
        MemoryModel model(other, 3);
        check_error([&] { load_checkpoint(d.path, model); }, d.path);
        CHECK(model.writes == 0);
    }
}

TEST_CASE("checkpoint: a changed byte of any file is an error that names the file") {
    Damage d;
    SEEDED_RANDOM(rng);
    for (const std::string file : {"model.safetensors", "optimizer.state", "config.json", "trainer.json"}) {
        const std::string path = d.path + "/" + file, bytes = read_file(path);
        d.rejected(file, bytes.substr(0, bytes.size() / 2), file);
        d.rejected(file, bytes + "x", file);
        fs::rename(path, path + ".gone");
        check_error([&] { d.load(); }, path);
        fs::rename(path + ".gone", path);
        for (int64_t i = 0; i < cases(60, 30); i++) {
            const auto size = int64_t(bytes.size());
            std::string bad = bytes;
            char& byte = bad[size_t(i == 0 ? 0 : i == 1 ? size - 2 : rng.below(size))];
            byte = isspace(byte) ? 'x' : char(byte ^ 1);  // white space in trainer.json says nothing
            d.rejected(file, bad, file);
        }
        check_random_damage(path, bytes.size(), cases(300, 60), [&] { d.load(); });
        CHECK(d.saved.tensors == d.loaded.tensors);
    }
    const ordered_json good = ordered_json::parse(read_file(d.path + "/trainer.json"));
    for (const auto& [field, value] : good.items()) {  // every field is required, and each has its hash
        ordered_json bad = good;
        bad.erase(field);
        d.rejected("trainer.json", bad.dump(), "trainer.json");
        bad[field] = value.is_number() ? ordered_json(value.get<double>() + 1) : ordered_json("other");
        d.rejected("trainer.json", bad.dump(), "trainer.json");
    }
    ordered_json earlier = good;
    earlier["version"] = 2;
    d.rejected("trainer.json", earlier.dump(), "--model");
    // With a hash that fits, as another version may write it: read or rejected; other exceptions fail here.
    for (const char* field : {"step", "updates", "hashes", "settings"})
        for (const nlohmann::json& value : {nlohmann::json("x"), nlohmann::json(), nlohmann::json(5)}) {
            nlohmann::json bad = good;
            bad[field] = value;
            bad.erase("hash");
            const std::string text = bad.dump();
            bad["hash"] = std::to_string(hash_bytes(text.data(), int64_t(text.size()), text.size()));
            write_file(d.path + "/trainer.json", bad.dump());
            error_of([&] { d.load(); });
        }
}

TEST_CASE("checkpoint: the newest by number counts; --keep newest stay; nothing of another name is touched") {
    Folder folder;
    const std::string out = folder / "out";
    MemoryModel model(small_settings(LLAMA), 1);
    CHECK(find_checkpoint(out) == "");
    save(out, model, 5);
    save(out, model, 10);
    CHECK(names_in(out) == Names{"step-000005", "step-000010"});
    Names mine = {"step-", "step-notes", "step-000007x", "x-000007", "step-000099.tmp.txt", "logs"};
    for (const std::string& name : mine) fs::create_directory(out + "/" + name);
    for (const char* name : {"step-000099.tmp", "step-000003.tmp"}) fs::create_directory(out + "/" + name);
    write_file(out + "/step-000999", "no folder");
    CHECK(find_checkpoint(out) == out + "/step-000010");
    mine.insert("step-000999");
    for (const auto& [step, keep, steps] : {std::tuple{20, 2, Names{"step-000010", "step-000020"}},
                                            {1234567, 3, {"step-000010", "step-000020", "step-1234567"}},
                                            {1234568, 1, {"step-1234568"}}}) {
        const std::string path = save(out, model, step, keep);
        CHECK(find_checkpoint(out) == path);
        Names expected = mine;
        expected.insert(steps.begin(), steps.end());
        CHECK(names_in(out) == expected);
    }
}

TEST_CASE("checkpoint: of those in a folder the newest whole one is found and the others are named") {
    Damage d;
    const std::string out = d.folder / "out", newer = out + "/step-000009", older = d.path;
    auto check_skipped = [&](const std::string& why) {
        CAPTURE(why);
        const WholeCheckpoint found = find_whole_checkpoint(out);
        CHECK(found.path == older);
        REQUIRE(found.skipped.size() == 1);
        CHECK(found.skipped[0].path == newer);
        check_error(found.skipped[0].why, newer, why);
        check_error([&] { find_whole_checkpoint(newer); }, newer);  // it alone
    };
    CHECK(find_whole_checkpoint(out).skipped.empty());
    fs::create_directory(newer);
    check_skipped("trainer.json");
    fs::remove(newer);
    save(out, d.saved, 9);
    CHECK((find_whole_checkpoint(out).path == newer && find_whole_checkpoint(older).path == older));
    for (const std::string name : {"trainer.json", "config.json", "model.safetensors", "optimizer.state"}) {
        const std::string path = newer + "/" + name, good = read_file(path);
        std::string flipped = good, zeros = good;
        flipped[good.size() / 2] ^= 1;
        std::fill(zeros.end() - long(good.size() / 4), zeros.end(), '\0');  // as after a power failure
        for (const std::string& bad : {std::string(), good.substr(0, good.size() / 2), flipped, zeros}) {
            write_file(path, bad);
            check_skipped(name);
        }
        fs::remove(path);
        check_skipped(name);
        write_file(path, good);
    }
    CHECK(find_whole_checkpoint(out).path == newer);
    for (const std::string& path : {older, newer}) write_file(path + "/model.safetensors", "x");
    check_error([&] { find_whole_checkpoint(out); }, "--resume " + out, newer + "/model.safetensors");
    check_error([&] { find_whole_checkpoint(d.folder / "none"); }, "--resume " + d.folder / "none");
    CHECK(set_aside(newer) == newer + ".damaged");
    fs::create_directory(newer);
    CHECK(set_aside(newer) == newer + ".damaged-2");
    CHECK(names_in(out) == Names{"step-000005", "step-000009.damaged", "step-000009.damaged-2"});
}

TEST_CASE("train: --resume takes the newest whole checkpoint and says which it skipped and why") {
    RunFolder folder;
    for (const char* out : {"out", "whole"})
        require_success(
            tiny(folder, concat("--recipe fp32 --steps 4 --save-every 2 --accumulate 2 --out ", out)));
    folder.write("out/step-000004/optimizer.state", "a part");
    const std::string skipped =
        "train: The checkpoint out/step-000004 is damaged, so the run goes on from an older one. "
        "out/step-000004/optimizer.state is not the file that was saved";
    for (const std::string flags : {"--plan", "--steps 3 --out other"}) {  // these write nothing into out
        const Ended ended = train(folder, "--device cpu --resume out " + flags);
        require_success(ended);
        CHECK(contains(ended.error, skipped));
        CHECK(names_in(folder / "out") == Names{"step-000002", "step-000004"});
    }
    const Ended resumed = train(folder, "--device cpu --resume out --ranks 2");
    require_success(resumed);
    CHECK(contains(resumed.error, skipped));
    CHECK(contains(resumed.error, "train: out/step-000004 is now out/step-000004.damaged.\n"));
    CHECK(std::count(resumed.error.begin(), resumed.error.end(), '\n') == 2);  // not once for each rank
    CHECK(contains(resumed.out, "continuing step 2 of out/step-000002"));
    CHECK(names_in(folder / "out") == Names{"step-000002", "step-000004", "step-000004.damaged"});
    CHECK((tensors_of(folder.path / "out/step-000004") == tensors_of(folder.path / "whole/step-000004")));
}

TEST_CASE("checkpoint: every file is on the disk before it gets its name and the folders after") {
    Folder folder;
    MemoryModel model(small_settings(LLAMA), 1);
    const std::string root = fs::canonical(folder.path).string(), out = root + "/new/out";
    calls.clear();
    create_folders(out);
    create_folders(folder / "slash/");
    CHECK(fs::is_directory(folder.path / "slash"));
    const std::string path = save_checkpoint(out, model, some_run(10), {{"templates/a.jinja", "text"}});
    auto at = [&](const std::string& call) {
        const auto found = std::find(calls.begin(), calls.end(), call);
        CHECK_MESSAGE(found != calls.end(), call);
        return found - calls.begin();
    };
    const auto renamed = at("rename " + path + ".tmp");
    for (const auto& [name, bytes] : files_below(path)) CHECK(at("sync " + path + ".tmp/" + name) < renamed);
    CHECK((at("sync " + path + ".tmp") < renamed && at("sync " + path + ".tmp/templates") < renamed));
    CHECK(at("sync " + out) > renamed);
    CHECK((at("sync " + root) < renamed && at("sync " + root + "/new") < renamed));  // the new folders' names
    save(out, model, 20);
    // An older checkpoint that cannot be removed does not end the run.
    fails = "rename " + path;
    calls.clear();
    CHECK(find_checkpoint(out) == save(out, model, 30));
    CHECK(names_in(out) == Names{"step-000010", "step-000020", "step-000030"});
    CHECK(at("sync " + out) < at("rename " + path));  // older ones go last
    // A folder that could not be synced: the next try of the same step succeeds.
    fails = "sync " + out;
    check_error([&] { save(out, model, 40); }, out, "--out");
    fails.clear();
    CHECK(save(out, model, 40) == out + "/step-000040");
    CHECK(names_in(out) == Names{"step-000030", "step-000040"});
}

TEST_CASE("checkpoint: a disk that is full or cannot be written is an error; the checkpoints before stay") {
    Damage d;
    const std::string out = d.folder / "out";
    const auto bytes = rlim_t(fs::file_size(d.path + "/optimizer.state"));
    // A limit on the size of a file stands for a full disk. Each limit stops the save at another place.
    for (rlim_t limit : {rlim_t{0}, rlim_t{100}, rlim_t{5000}, bytes - 1}) {
        rlimit before{};
        getrlimit(RLIMIT_FSIZE, &before);
        const auto handler = std::signal(SIGXFSZ, SIG_IGN);
        const rlimit tight{limit, before.rlim_max};
        setrlimit(RLIMIT_FSIZE, &tight);
        const std::string error = error_of([&] { save(out, d.saved, 6); });
        setrlimit(RLIMIT_FSIZE, &before);
        std::signal(SIGXFSZ, handler);
        check_error(error, out + "/step-000006.tmp/", "--out");
        CHECK(names_in(out) == Names{"step-000005"});
    }
    save(out, d.saved, 6);
    CHECK(names_in(out) == Names{"step-000005", "step-000006"});
}

// A child saves for ever. While it is stopped, the disk holds what a kill would leave. Then it is killed.
TEST_CASE("checkpoint: a good one exists at every moment of a save and a kill leaves the last") {
    Folder folder;
    const std::string out = folder / "out";
    const RunSettings s = small_settings(LLAMA);
    MemoryModel first(s, 1), loaded(s, 0);
    save(out, first, 1);
    SEEDED_RANDOM(rng);
    int64_t last = 1, torn = 0;  // the newest step seen; stops in the middle of a save
    for (int64_t kills = 0; kills < cases(40, 8); kills++) {
        const pid_t child = fork();
        REQUIRE(child >= 0);
        for (int64_t step = last + 1; !child; step++) {
            MemoryModel model(s, uint64_t(step));
            save(out, model, step, 1);
        }
        int status = 0;
        for (int64_t stops = 0; stops < 60; stops++) {
            usleep(useconds_t(rng.below(1500)));
            kill(child, SIGSTOP);
            waitpid(child, &status, WUNTRACED);
            for (const std::string& name : names_in(out)) torn += contains(name, ".tmp");
            const int64_t step = read_saved_run(find_checkpoint(out)).state.step;
            REQUIRE(step >= last);
            last = step;
            kill(child, SIGCONT);
        }
        kill(child, SIGKILL);
        waitpid(child, &status, 0);
        load_checkpoint(find_checkpoint(out), loaded);
        last = read_saved_run(find_checkpoint(out)).state.step;
        REQUIRE(loaded.tensors == MemoryModel(s, uint64_t(last)).tensors);
    }
    CHECK(torn > 0);
    save(out, first, last + 1, 1);
    CHECK(names_in(out).size() == 1);  // what the kills left is removed
}
