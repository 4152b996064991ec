// data/checkpoint.cpp - saves and resumes a training run (checkpoint.h). OUT/step-000300 is a complete
// checkpoint; step-000300.tmp is being written or removed, and never read.
#include "checkpoint.h"

#include "../program/ranks.h"

namespace coat {
namespace {

const std::string OPTIMIZER_FILE = "optimizer.state", TRAINER_FILE = "trainer.json";
const std::vector<std::string> HASHED = {"config.json", "model.safetensors", OPTIMIZER_FILE};

// Of all fields of trainer.json but this one.
std::string hash_of_fields(json trainer) {
    trainer.erase("hash");
    const std::string text = trainer.dump();
    return std::to_string(hash_bytes(text.data(), int64_t(text.size()), text.size()));
}

void write_trainer(const std::string& folder, const LoopState& s) {
    ordered_json trainer = {{"format", "coat checkpoint"},
                            {"version", 3},
                            {"step", s.step},
                            {"updates", s.updates},
                            {"first_validation", s.first_validation},
                            {"settings", s.settings}};
    for (const std::string& name : HASHED) trainer["hashes"][name] = hash_file(path_in(folder, name));
    trainer["hash"] = hash_of_fields(trainer);
    save_file(path_in(folder, TRAINER_FILE), trainer.dump(2) + "\n");
}

Fields read_trainer(const std::string& checkpoint) {
    const Fields f = read_json(path_in(checkpoint, TRAINER_FILE));
    if (f.get<int64_t>("version") != 3)
        f.reject("version", "3; weights of earlier versions load with --model");
    if (f.get<std::string>("hash") != hash_of_fields(f.object))
        throw Error(f.path, " was changed; resume from another checkpoint, with another --out.");
    return f;
}

// The step in the name of a folder; -1 if it is not "step-" and digits.
int64_t step_of(const fs::path& folder) {
    const std::string name = folder.filename().string();
    const bool ok = name.rfind("step-", 0) == 0 && name.size() > 5 && name.size() <= 20 &&
                    name.find_first_not_of("0123456789", 5) == name.npos;
    return ok ? std::stoll(name.substr(5)) : -1;
}

std::map<int64_t, fs::path> checkpoints_in(const std::string& out) {  // by step
    std::map<int64_t, fs::path> found;
    std::error_code none;
    for (const fs::path& path : fs::directory_iterator(out, none))
        if (step_of(path) >= 0 && fs::is_directory(path)) found[step_of(path)] = path;
    return found;
}

// What cannot be removed does not end a run. Checkpoints are renamed first: if the program is killed
// meanwhile, no incomplete folder has the name of one.
void remove_older(const std::string& out, int64_t keep) {
    std::error_code ignored;
    std::map<int64_t, fs::path> found = checkpoints_in(out);
    for (; int64_t(found.size()) > keep; found.erase(found.begin()))
        fs::rename(found.begin()->second, found.begin()->second.string() + ".tmp", ignored);
    for (const fs::path& path : fs::directory_iterator(out))
        if (path.extension() == ".tmp" && step_of(path.stem()) >= 0) fs::remove_all(path, ignored);
}

}  // namespace

void create_folders(const std::string& folder) {
    const fs::path path = fs::absolute(folder).lexically_normal(), above = path.parent_path();
    std::error_code failed;
    if (fs::is_directory(path, failed)) return;
    if (above != path) create_folders(above.string());
    fs::create_directory(path, failed);
    if (failed)
        throw Error("--out ", folder, " cannot be created (", failed.message(), "); choose another folder.");
    sync(above.string());
}

std::string save_checkpoint(const std::string& out, Model& model, const LoopState& state,
                            const Companions& companions, int64_t keep) {
    char name[32];
    std::snprintf(name, sizeof name, "step-%06ld", state.step);
    const std::string folder = path_in(out, name), temporary = folder + ".tmp";
    const Setup& setup = model.setup();
    const bool writes = setup.rank == 0;
    std::string error;
    std::error_code ignored;  // then the files cannot be written, which is an Error below
    if (writes) fs::remove_all(temporary, ignored), fs::create_directories(temporary, ignored);
    try {  // what fails on rank 0 does so after all ranks have sent all tensors
        std::vector<Tensor> tensors;
        for (const StateTensor& t : optimizer_tensors(setup)) tensors.push_back({t.name, t.dtype, t.shape});
        const std::string path = path_in(temporary, OPTIMIZER_FILE);
        std::ofstream file(writes ? path : "", std::ios::binary);
        file << safetensors_header(tensors);
        for (const StateTensor& t : optimizer_tensors(setup)) {
            const Bytes bytes = whole_tensor(model, t);
            file.write(reinterpret_cast<const char*>(bytes.data()), int64_t(bytes.size()));
        }
        save_model_folder(temporary, model, companions);
        if (writes) {
            finish(file, path);
            write_trainer(temporary, state);
            sync(temporary);
            if (!fs::exists(folder)) fs::rename(temporary, folder);  // else it was saved before
            sync(out);
            remove_older(out, keep);
        }
    } catch (const std::exception& e) {
        error = e.what();
        if (writes) fs::remove_all(temporary, ignored);
    }
    if (setup.processes) error = setup.processes->all_gather(error).front();
    if (!error.empty()) throw Error(error);
    return folder;
}

std::string find_checkpoint(const std::string& folder) {
    if (fs::exists(path_in(folder, TRAINER_FILE))) return folder;
    const std::map<int64_t, fs::path> found = checkpoints_in(folder);
    return found.empty() ? "" : found.rbegin()->second.string();
}

void require_whole(const std::string& checkpoint) {
    const Fields hashes = read_trainer(checkpoint).get<Fields>("hashes");
    for (const std::string& name : HASHED)
        if (hashes.get<std::string>(name) != hash_file(path_in(checkpoint, name)))
            throw Error(path_in(checkpoint, name), " is not the file that was saved (trainer.json has its ",
                        "hash); resume from another checkpoint, with another --out.");
}

WholeCheckpoint find_whole_checkpoint(const std::string& folder) {
    std::vector<std::string> newest_first;
    for (const auto& [step, path] : checkpoints_in(folder)) newest_first.insert(newest_first.begin(), path);
    if (fs::exists(path_in(folder, TRAINER_FILE))) newest_first = {folder};
    WholeCheckpoint found;
    for (const std::string& path : newest_first) {
        try {
            require_whole(path);
            found.path = path;
            return found;
        } catch (const Error& error) {
            found.skipped.push_back({path, error.what()});
        }
    }
    throw Error("--resume ", folder, " has no whole checkpoint",
                found.skipped.empty() ? "; give another folder." : ": " + found.skipped.front().why);
}

std::string set_aside(const std::string& checkpoint) {
    std::string name = checkpoint + ".damaged";
    for (int n = 2; fs::exists(name); n++) name = concat(checkpoint, ".damaged-", n);
    fs::rename(checkpoint, name);
    return name;
}

LoopState read_loop_state(const std::string& checkpoint) {
    const Fields f = read_trainer(checkpoint);
    return {f.get<int64_t>("step"), f.get<int64_t>("updates"), f.get<double>("first_validation"),
            f.get<Fields>("settings").object};
}

void load_checkpoint(const std::string& checkpoint, Model& model) {
    const Setup& setup = model.setup();
    const Safetensors file(path_in(checkpoint, OPTIMIZER_FILE));
    const std::vector<StateTensor> table = optimizer_tensors(setup);
    for (const StateTensor& t : table) file.require(t.name, t.shape, t.dtype);
    load_weights(checkpoint, setup.config, &model);
    for (const StateTensor& t : table)
        model.write(t.name, file.require(t.name, t.shape, t.dtype).data + kept(setup, t).first * t.bytes);
}

}  // namespace coat
