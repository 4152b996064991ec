// data/checkpoint.cpp - saves and resumes a training run (checkpoint.h).
//
// First what a checkpoint holds beside the model folder: the optimizer's state and the state of the training
// loop, each written and read back. The second half, from "Folders" on, only keeps a complete checkpoint on
// disk at every moment; a first reader may skip it.
#include "checkpoint.h"

#include <set>

#include "../plan.h"
#include "../ranks.h"
#include "json.h"
#include "safetensors.h"

namespace coat {
namespace fs = std::filesystem;
using nlohmann::json;
using nlohmann::ordered_json;

namespace {

const std::string OPTIMIZER_FILE = "optimizer.safetensors", TRAINER_FILE = "trainer.json";

// -----------------------------------------------------------------------------------------------------------
// optimizer.safetensors: the tensors of optimizer_tensors() (model.h), byte for byte as the model has them.

// In the order of the file. Tensors with larger elements come first, so that every element is aligned, as
// PyTorch's reader requires.
std::vector<StateTensor> file_order(std::vector<StateTensor> table) {
    std::stable_sort(table.begin(), table.end(), [](auto& a, auto& b) { return a.bytes > b.bytes; });
    return table;
}

void save_optimizer(const std::string& path, Model& model) {
    const std::vector<StateTensor> table = file_order(optimizer_tensors(model.setup()));
    std::vector<TensorInfo> tensors;
    for (const StateTensor& t : table) tensors.push_back({t.name, t.dtype, t.shape});
    SafetensorsWriter file(path, tensors);
    for (const StateTensor& t : table) file.write(whole_tensor(model, t).data(), t.total_bytes());
    file.finish();
}

// Error if a tensor has values that no run produces and that would spread through training: NaN, infinity,
// negative magnitudes, an expansion factor k outside its bounds. Histories of amaxes may hold infinity and
// NaN: no scale comes from them.
void require_valid(const Safetensors& file, const StateTensor& t) {
    static const std::map<std::string, uint32_t> infinities = {  // E4M3 has none: its NaN
        {"F32", 0x7F800000}, {"BF16", 0x7F80}, {"F16", 0x7C00}, {"F8_E4M3", 0x7F}, {"F8_E5M2", 0x7C}};
    if (!infinities.count(t.dtype)) return;  // remainders: all bits are valid
    const uint32_t infinity = infinities.at(t.dtype), sign = 1u << (8 * t.bytes - 1);
    const bool k = ends_with(t.name, ".k"), history = ends_with(t.name, ".history");
    const bool magnitudes = !ends_with(t.name, ".m");
    const uint8_t* data = file.find(t.name)->data;
    int64_t bad = 0;
#pragma omp parallel for reduction(+ : bad)
    for (int64_t i = 0; i < t.size(); i++) {
        uint32_t bits = 0;
        std::memcpy(&bits, data + i * t.bytes, size_t(t.bytes));
        float value;
        std::memcpy(&value, &bits, sizeof value);
        bad += (!history && (bits & ~sign) >= infinity) || (magnitudes && bits > sign) ||
               (k && !(value >= 0.0625f && value <= 64));
    }
    if (bad)
        throw Error(file.path(), " has invalid values in ", t.name, "; resume from another checkpoint.");
}

// -----------------------------------------------------------------------------------------------------------
// trainer.json: the state of the loop, the formats of the run, and a hash of each file of tensors.

// What must be equal on resume, by the flag that chooses it.
ordered_json formats_of(const Setup& s) {
    ordered_json formats = {{"recipe", s.recipe.name}, {"optimizer", s.optimizer.name}};
    for (const MemoryMode& mode : memory_modes())
        formats[mode.flag] = mode.chosen(s);
    return formats;
}

// The hashes of each MiB, joined by exclusive or, so that all threads work. Each step is a bijection of the
// word and of the hash so far: a change in one word always changes the result.
std::string hash_file(const std::string& path) {
    constexpr int64_t PART = 1 << 20;
    const MappedFile file(path);
    auto hash = uint64_t(file.bytes());
#pragma omp parallel for reduction(^ : hash) if (file.bytes() > 16 * PART)
    for (int64_t begin = 0; begin < file.bytes(); begin += PART) {
        auto part = uint64_t(begin);
        for (int64_t at = begin, end = std::min(begin + PART, file.bytes()); at < end; at += 8) {
            uint64_t word = 0;
            std::memcpy(&word, file.data() + at, size_t(std::min<int64_t>(8, end - at)));
            part = (part ^ word) * 0x9E3779B97F4A7C15u;
            part ^= part >> 32;
        }
        hash ^= part;
    }
    return std::to_string(hash);
}

void save_loop_state(const std::string& folder, const LoopState& s, const Setup& setup) {
    ordered_json hashes;
    for (const auto& name : {WEIGHTS_FILE, OPTIMIZER_FILE}) hashes[name] = hash_file(path_in(folder, name));
    // JSON has no NaN: a loss of NaN becomes null.
    write_json(path_in(folder, TRAINER_FILE),
               {{"format", "coat checkpoint"}, {"version", 2}, {"formats", formats_of(setup)},
                {"step", s.step}, {"updates", s.updates}, {"epoch", s.position.epoch},
                {"window", s.position.window}, {"tokens", s.tokens},
                {"first_validation", s.first_validation}, {"settings", s.settings}, {"run", s.run}, {"validation", s.validation}, {"hashes", hashes}});
}

Fields read_trainer(const std::string& checkpoint) {
    const Fields f = read_json(path_in(checkpoint, TRAINER_FILE));
    if (f.text("format") != "coat checkpoint")
        f.reject("format", "must be \"coat checkpoint\"; give a checkpoint");
    if (f.natural("version") != 2) f.reject("version", "must be 2; use the program that wrote it");
    return f;
}

// Returns when all ranks are here. If one of them has failed, this one ends, too.
void wait_for_ranks(const Setup& setup) {
    if (setup.processes) setup.processes->all_gather(Bytes());
}

}  // namespace

LoopState read_loop_state(const std::string& checkpoint) {
    const Fields f = read_trainer(checkpoint);
    auto loss = [&](const std::string& field) {
        const json value = f.object.value(field, json());
        return value.is_number() ? value.get<double>() : std::numeric_limits<double>::quiet_NaN();
    };
    LoopState s;
    s.step = f.natural("step");
    s.updates = f.natural("updates");
    if (s.updates > s.step)
        f.reject("updates", "is ", s.updates, " after ", s.step, " steps; give another --resume");
    s.position = {f.natural("epoch"), f.natural("window")};
    s.tokens = f.natural("tokens");
    s.first_validation = loss("first_validation");
    s.settings = f.text("settings");
    s.run = f.text("run");
    s.validation = loss("validation");
    return s;
}

void check_checkpoint(const std::string& checkpoint) {
    read_model_config(checkpoint);
    for (const std::string& file : {WEIGHTS_FILE, OPTIMIZER_FILE}) Safetensors(path_in(checkpoint, file));
}

void load_checkpoint(const std::string& checkpoint, Model& model) {
    const Setup& setup = model.setup();
    require_same_config(checkpoint, setup.config);
    const Fields trainer = read_trainer(checkpoint), formats = trainer.inner("formats"),
                 hashes = trainer.inner("hashes");
    const ordered_json our_formats = formats_of(setup);
    for (const auto& [flag, ours] : our_formats.items())
        if (const std::string theirs = formats.text(flag); theirs != ours)
            throw Error(checkpoint, " is of a run with --", flag, " ", escaped(theirs), ", not ",
                        ours.get<std::string>(), "; resume with --", flag, " ", escaped(theirs), ".");
    // All files are checked before the first write: an error leaves the model as it was.
    const Safetensors file(path_in(checkpoint, OPTIMIZER_FILE));
    const std::vector<StateTensor> table = optimizer_tensors(setup);
    for (const StateTensor& t : table) {
        file.require(t.name, t.dtype, t.shape);
        if (setup.rank == 0) require_valid(file, t);
    }
    for (const std::string& name : {WEIGHTS_FILE, OPTIMIZER_FILE})
        if (setup.rank == 0 && hashes.text(name) != hash_file(path_in(checkpoint, name)))
            throw Error(path_in(checkpoint, name), " is damaged: its hash is not that in trainer.json; "
                        "resume from another checkpoint.");
    wait_for_ranks(setup);
    load_weights(checkpoint, model);
    for (const StateTensor& t : table)
        model.write(t.name, file.find(t.name)->data + kept(setup, t).first * t.bytes);
}

// -----------------------------------------------------------------------------------------------------------
// Folders. OUT/step-000300 is a complete checkpoint. step-000300.tmp is being written or removed, and never
// read. step-000300.old is the complete one that a new step-000300 replaces. step-000300.other is set aside:
// it belongs to another run, or this run was resumed from an earlier step.

namespace {

struct Checkpoint {
    fs::path folder;
    LoopState state;
};

// Whether the name of a folder is "step-", digits, and this end.
bool is_step(const fs::path& folder, const std::string& end) {
    const std::string name = folder.filename().string();
    const size_t digits_end = std::min(name.find_first_not_of("0123456789", 5), name.size());
    return name.rfind("step-", 0) == 0 && digits_end > 5 && name.substr(digits_end) == end;
}

std::set<fs::path> entries(const std::string& folder) { return {fs::directory_iterator(folder), {}}; }

// All checkpoints in a folder that can be read, in the order of their names: step-000300 before
// step-000300.old.
std::vector<Checkpoint> checkpoints(const std::string& folder, const Warn& warn = {}) {
    std::vector<Checkpoint> found;
    for (const fs::path& path : entries(folder)) {
        if (!is_step(path, "") && !is_step(path, ".old")) continue;
        try {
            check_checkpoint(path.string());
            found.push_back({path, read_loop_state(path.string())});
        } catch (const std::exception& e) {
            if (warn && is_step(path, ""))
                warn(path.string() + " cannot be read as a checkpoint and is skipped: " + e.what());
        }
    }
    return found;
}

// Renames first: if the program is killed meanwhile, no incomplete folder has the name of a checkpoint.
void remove_checkpoint(const Checkpoint& c) {
    const fs::path doomed = c.folder.string() + ".tmp";
    std::error_code failed;  // what cannot be removed does not end a run
    fs::rename(c.folder, doomed, failed);
    if (!failed) fs::remove_all(doomed, failed);
}

void remove_leftovers(const std::string& out) {  // of runs that were killed
    std::error_code ignored;
    for (const fs::path& path : entries(out))
        for (const char* end : {".tmp", ".old.tmp"})
            if (is_step(path, end)) fs::remove_all(path, ignored);
}

void set_aside(const fs::path& folder, const std::string& end) {
    fs::path name = folder.string() + end;
    while (has_entry(name.string())) name += ".other";
    fs::rename(folder, name);
    if (end == ".other") std::printf("set aside | %s\n", printable(name.string()).c_str());
}

// Renames `complete` to `folder`. What has that name is first renamed: to .old if it is a checkpoint of this
// run, so that one of the two names always has a complete checkpoint, and otherwise to .other. So are this
// run's checkpoints of later steps: then the one with the largest step is the newest.
void move_into_place(const std::string& complete, const std::string& folder, const LoopState& state) {
    const std::string out = fs::path(folder).parent_path().string();
    bool own = false;
    for (const Checkpoint& c : checkpoints(out)) {
        if (c.state.run != state.run) continue;
        own |= c.folder == folder;
        if (own && c.folder == folder + ".old") remove_checkpoint(c);
        else if (c.state.step > state.step) set_aside(c.folder, ".other");
    }
    if (has_entry(folder)) set_aside(folder, own ? ".old" : ".other");
    fs::rename(complete, folder);
    sync_folder(out);
}

// Removes this run's checkpoints of earlier steps, except the one with the lowest validation loss, if that is
// below the new checkpoint's.
void remove_older(const std::string& out, const LoopState& state) {
    std::vector<Checkpoint> older;
    for (const Checkpoint& c : checkpoints(out)) {
        if (c.state.run != state.run) continue;
        if (c.state.step < state.step) older.push_back(c);
        else if (is_step(c.folder, ".old")) remove_checkpoint(c);
    }
    auto loss = [](const LoopState& s) {
        return std::isnan(s.validation) ? std::numeric_limits<double>::infinity() : s.validation;
    };
    double lowest = loss(state);
    fs::path best;  // empty if the new checkpoint is the best
    for (const Checkpoint& c : older)
        if (loss(c.state) < lowest) lowest = loss(c.state), best = c.folder;
    for (const Checkpoint& c : older)
        if (c.folder != best) remove_checkpoint(c);
}

// An exception of std::filesystem names the cause; the Error also says what to do.
Error with_advice(const fs::filesystem_error& e, const std::string& folder) {
    const std::string path = e.path1().empty() ? folder : e.path1().string();
    return Error("Cannot use ", path, " (", e.code().message(),
                 "); check the disk and permissions, or give another --out or --resume.");
}

}  // namespace

std::string save_checkpoint(const std::string& out, Model& model, const LoopState& state,
                            const Companions& companions) try {
    char name[32];
    std::snprintf(name, sizeof name, "step-%06ld", state.step);
    const std::string folder = path_in(out, name), temporary = folder + ".tmp";
    const Setup& setup = model.setup();
    if (setup.rank) {  // sends what it keeps, in the order in which rank 0 writes
        for (const auto& table : {weight_tensors(setup.config), file_order(optimizer_tensors(setup))})
            for (const StateTensor& t : table) whole_tensor(model, t);
        return wait_for_ranks(setup), folder;
    }
    std::error_code failed;
    create_folders(out, failed);
    if (failed) throw fs::filesystem_error("", out, failed);
    remove_leftovers(out);
    try {
        fs::create_directory(temporary);
        save_model_folder(temporary, model, companions);
        save_optimizer(path_in(temporary, OPTIMIZER_FILE), model);
        save_loop_state(temporary, state, setup);
        sync_folder(temporary);
        move_into_place(temporary, folder, state);
    } catch (...) {
        std::error_code ignored;  // the first error is the one to report
        fs::remove_all(temporary, ignored);
        throw;
    }
    remove_older(out, state);
    wait_for_ranks(setup);
    return folder;
} catch (const fs::filesystem_error& e) {
    throw with_advice(e, out);
}

std::string find_checkpoint(const std::string& folder, const Warn& warn) try {
    if (!fs::is_directory(folder))
        throw Error(folder, " is not a folder; give a checkpoint, or a folder of them.");
    if (fs::exists(path_in(folder, TRAINER_FILE))) return folder;
    const std::vector<Checkpoint> found = checkpoints(folder, warn);
    const auto newest = std::max_element(found.begin(), found.end(), [](auto& a, auto& b) {
        return a.state.step < b.state.step;  // of equal steps the first
    });
    if (newest == found.end())
        throw Error(folder, " has no complete checkpoint; give a folder that a run wrote with --out.");
    return newest->folder.string();
} catch (const fs::filesystem_error& e) {
    throw with_advice(e, folder);
}

}  // namespace coat
