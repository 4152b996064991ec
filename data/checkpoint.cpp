// data/checkpoint.cpp - saves and resumes a training run (checkpoint.h).
//
// OUT/step-000300 is a complete checkpoint, and was renamed to this name when it was. step-000300.tmp is
// being written or removed, and never read.
#include "checkpoint.h"

#include <algorithm>

#include "../program/ranks.h"

namespace coat {
namespace fs = std::filesystem;
using nlohmann::json;

namespace {

const std::string OPTIMIZER_FILE = "optimizer.state", TRAINER_FILE = "trainer.json";
const std::vector<std::string> HASHED = {"config.json", "model.safetensors", OPTIMIZER_FILE};

// The tensors of optimizer.state, byte for byte as the model has them. Those with larger elements come first,
// so that every element is aligned, as PyTorch's reader requires.
std::vector<StateTensor> optimizer_table(const Setup& setup) {
    std::vector<StateTensor> table = optimizer_tensors(setup);
    std::stable_sort(table.begin(), table.end(), [](auto& a, auto& b) { return a.bytes > b.bytes; });
    return table;
}

// Of all fields of trainer.json but this one.
std::string hash_of_fields(json trainer) {
    trainer.erase("hash");
    const std::string text = trainer.dump();
    return std::to_string(hash_bytes(text.data(), int64_t(text.size()), text.size()));
}

void write_checkpoint(const std::string& folder, const Setup& setup, const LoopState& s,
                      const Companions& companions, const WholeTensor& whole) {
    fs::create_directory(folder);
    save_model_folder(folder, setup.config, companions, whole);
    const std::vector<StateTensor> table = optimizer_table(setup);
    std::vector<TensorInfo> tensors;
    for (const StateTensor& t : table) tensors.push_back({t.name, t.dtype, t.shape});
    SafetensorsWriter file(path_in(folder, OPTIMIZER_FILE), tensors);
    for (const StateTensor& t : table) file.write(whole(t).data(), t.total_bytes());
    file.finish();
    nlohmann::ordered_json trainer = {{"format", "coat checkpoint"},
                                      {"version", 3},
                                      {"step", s.step},
                                      {"updates", s.updates},
                                      {"first_validation", s.first_validation},
                                      {"settings", s.settings}};
    for (const std::string& name : HASHED) trainer["hashes"][name] = hash_file(path_in(folder, name));
    trainer["hash"] = hash_of_fields(trainer);
    write_file(path_in(folder, TRAINER_FILE), trainer.dump(2) + "\n");
    sync_folder(folder);
}

Fields read_trainer(const std::string& checkpoint) {
    const Fields f = read_json(path_in(checkpoint, TRAINER_FILE));
    if (f.get<int64_t>("version") != 3)
        f.reject("version", "3; weights of earlier versions load with --model");
    if (f.get<std::string>("hash") != hash_of_fields(f.object))
        throw Error(f.path, " was changed: its hash is another; resume from another checkpoint.");
    return f;
}

// The step in the name of a folder; -1 if it is not "step-" and digits.
int64_t step_of(const fs::path& folder) {
    const std::string name = folder.filename().string(),
                      digits = name.substr(std::min<size_t>(5, name.size()));
    const bool ok = name.rfind("step-", 0) == 0 && !digits.empty() && digits.size() <= 15 &&
                    digits.find_first_not_of("0123456789") == std::string::npos;
    return ok ? std::stoll(digits) : -1;
}

std::vector<fs::path> newest_first(const std::string& out) {
    std::vector<fs::path> found;
    if (!fs::is_directory(out)) return {};
    for (const fs::path& path : fs::directory_iterator(out))
        if (step_of(path) >= 0 && fs::is_directory(path)) found.push_back(path);
    std::sort(found.begin(), found.end(), [](auto& a, auto& b) { return step_of(a) > step_of(b); });
    return found;
}

// What cannot be removed does not end a run. Checkpoints are renamed first: if the program is killed
// meanwhile, no incomplete folder has the name of one.
void remove_older(const std::string& out, int64_t keep) {
    std::error_code ignored;
    const std::vector<fs::path> found = newest_first(out);
    for (size_t i = std::max<int64_t>(keep, 1); i < found.size(); i++)
        fs::rename(found[i], found[i].string() + ".tmp", ignored);
    for (const fs::path& path : fs::directory_iterator(out))
        if (path.extension() == ".tmp" && step_of(path.stem()) >= 0) fs::remove_all(path, ignored);
}

}  // namespace

void create_folders(const std::string& folder) {
    fs::path changed = fs::absolute(folder).lexically_normal(), existing = changed;
    std::error_code ignored;
    while (!fs::exists(existing, ignored) && existing.has_relative_path()) existing = existing.parent_path();
    std::error_code failed;
    fs::create_directories(folder, failed);
    if (failed)
        throw Error("--out ", folder, " cannot be created (", failed.message(), "); choose another folder.");
    while (changed != existing) sync_folder((changed = changed.parent_path()).string());
}

std::string save_checkpoint(const std::string& out, Model& model, const LoopState& state,
                            const Companions& companions, int64_t keep) {
    char name[32];
    std::snprintf(name, sizeof name, "step-%06ld", state.step);
    const std::string folder = path_in(out, name), temporary = folder + ".tmp";
    const Setup& setup = model.setup();
    // The tensors that all ranks send, in the order in which rank 0 writes them. After an error there the
    // others are sent all the same, because the ranks are in the middle of them.
    std::vector<StateTensor> table = weight_tensors(setup.config);
    for (const StateTensor& t : optimizer_table(setup)) table.push_back(t);
    size_t sent = 0;
    auto whole = [&](const StateTensor& t) { return sent++, whole_tensor(model, t); };
    std::string error;
    if (setup.rank == 0) try {
            create_folders(out);
            fs::remove_all(temporary);
            if (!fs::exists(folder)) {  // it does if all but the sync below succeeded before
                write_checkpoint(temporary, setup, state, companions, whole);
                fs::rename(temporary, folder);
            }
            sync_folder(out);
            remove_older(out, keep);
        } catch (const std::exception& e) {
            error = e.what();
            std::error_code ignored;
            fs::remove_all(temporary, ignored);
        }
    while (sent < table.size()) whole(table[sent]);
    if (setup.processes) error = setup.processes->all_gather(error).front();
    if (!error.empty()) throw Error(error);
    return folder;
}

std::string find_checkpoint(const std::string& folder) {
    if (fs::exists(path_in(folder, TRAINER_FILE))) return folder;
    const std::vector<fs::path> found = newest_first(folder);
    return found.empty() ? "" : found[0].string();
}

LoopState read_loop_state(const std::string& checkpoint) {
    const Fields f = read_trainer(checkpoint);
    return {f.get<int64_t>("step"), f.get<int64_t>("updates"), f.get<double>("first_validation"),
            f.get<Fields>("settings").object};
}

void load_checkpoint(const std::string& checkpoint, Model& model) {
    const Setup& setup = model.setup();
    const Fields hashes = read_trainer(checkpoint).get<Fields>("hashes");
    for (const std::string& name : HASHED)
        if (const std::string path = path_in(checkpoint, name);
            setup.rank == 0 && hashes.get<std::string>(name) != hash_file(path))
            throw Error(
                path, " was changed: its hash is not that in trainer.json; resume from another checkpoint.");
    const Safetensors file(path_in(checkpoint, OPTIMIZER_FILE));
    const std::vector<StateTensor> table = optimizer_table(setup);
    for (const StateTensor& t : table) file.require(t.name, t.shape, t.dtype);
    load_weights(checkpoint, setup.config, &model);
    for (const StateTensor& t : table)
        model.write(t.name, file.require(t.name, t.shape, t.dtype).data + kept(setup, t).first * t.bytes);
}

}  // namespace coat
