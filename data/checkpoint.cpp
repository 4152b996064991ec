// data/checkpoint.cpp - saves and resumes a training run (checkpoint.h). OUT/step-000300 is a complete
// checkpoint; step-000300.tmp is being written or removed, and never read.
#include "checkpoint.h"

#include "files.h"
#include "safetensors.h"

namespace coat {

const std::string OPTIMIZER_FILE = "optimizer.state", TRAINER_FILE = "trainer.json";
const std::vector<std::string> HASHED_FILES = {"config.json", "model.safetensors", OPTIMIZER_FILE};

constexpr int64_t VERSION_OF_TRAINER = 3;

// The hash of all fields of trainer.json except "hash", the field that keeps it.
static std::string hash_of_fields(json trainer) {
    trainer.erase("hash");
    const std::string text = trainer.dump();
    const int64_t bytes = text.size();
    return std::to_string(hash_bytes(text.data(), bytes, bytes));
}

static void write_trainer(const std::string& folder, const SavedRun& run) {
    ordered_json trainer = {
        {"format", "coat checkpoint"},
        {"version", VERSION_OF_TRAINER},
        {"step", run.state.step},
        {"updates", run.state.updates},
        {"first_validation", run.state.first_validation},
        {"settings", run.flags},
    };
    for (const std::string& name : HASHED_FILES) trainer["hashes"][name] = hash_file(path_in(folder, name));
    trainer["hash"] = hash_of_fields(trainer);
    save_file(path_in(folder, TRAINER_FILE), trainer.dump(2) + "\n");
}

static Fields read_trainer(const std::string& checkpoint) {
    const Fields trainer = read_json(path_in(checkpoint, TRAINER_FILE));
    const int64_t version = trainer.get<int64_t>("version");
    if (version != VERSION_OF_TRAINER)
        throw Error(trainer.path, " has version ", version, ", but this program continues runs of version ",
                    VERSION_OF_TRAINER, "; start a new run from the weights with --model ", checkpoint, ".");
    if (trainer.get<std::string>("hash") != hash_of_fields(trainer.object))
        throw Error(trainer.path, " was changed since it was saved.");
    return trainer;
}

// The step in the name of a folder; -1 if the name is not "step-" and digits.
static int64_t step_of(const fs::path& folder) {
    const std::string name = folder.filename().string(), begin = "step-";
    if (!name.starts_with(begin)) return -1;
    const std::string digits = name.substr(begin.size());
    constexpr size_t MOST_DIGITS = 15;  // so many fit into an int64_t
    if (digits.empty() || digits.size() > MOST_DIGITS) return -1;
    return digits.find_first_not_of("0123456789") == digits.npos ? std::stoll(digits) : -1;
}

// The folders in `out` that have the names of checkpoints. The key is the step.
static std::map<int64_t, fs::path> checkpoints_in(const std::string& out) {
    std::map<int64_t, fs::path> found;
    std::error_code none;
    for (const fs::path& path : fs::directory_iterator(out, none))
        if (step_of(path) >= 0 && fs::is_directory(path)) found[step_of(path)] = path;
    return found;
}

// Removes all but the newest `keep` checkpoints, and what a killed program has left of others. A run goes on
// if something cannot be removed. Checkpoints are renamed first: if the program is killed meanwhile, no
// incomplete folder has the name of a checkpoint.
static void remove_older(const std::string& out, int64_t keep) {
    std::error_code ignored;
    const std::map<int64_t, fs::path> found = checkpoints_in(out);
    int64_t remaining = found.size();
    for (const auto& [step, path] : found) {
        if (remaining-- <= keep) break;
        fs::rename(path, path.string() + ".tmp", ignored);
    }
    for (const fs::path& path : fs::directory_iterator(out))
        if (path.extension() == ".tmp" && step_of(path.stem()) >= 0) fs::remove_all(path, ignored);
}

// Writes all files of a checkpoint into a folder. An error of writing is thrown after all ranks have sent all
// tensors, so that no rank waits for another.
static void write_files(const std::string& folder, Model& model, const SavedRun& run,
                        const FileContents& other_files) {
    const RunSettings& settings = model.settings();
    const bool writes = settings.rank == 0;
    const std::vector<StateTensor> table = tensors_besides_weights(settings);
    std::vector<HfTensor> tensors;
    for (const StateTensor& t : table)
        tensors.push_back({.name = t.name, .dtype = t.dtype, .shape = t.shape});
    const std::string path = path_in(folder, OPTIMIZER_FILE);
    std::ofstream file(writes ? path : "", std::ios::binary);  // other ranks open no file
    file << safetensors_header(tensors);
    for (const StateTensor& t : table) {
        const Bytes bytes = gather_whole_tensor(model, t);
        file.write(reinterpret_cast<const char*>(bytes.data()), std::ssize(bytes));
    }
    save_model_folder(folder, model, other_files);
    if (!writes) return;
    close_and_sync(file, path);
    write_trainer(folder, run);
    sync(folder);
}

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

std::string save_checkpoint(const std::string& out, Model& model, const SavedRun& run,
                            const FileContents& other_files, int64_t keep) {
    char name[32];
    std::snprintf(name, sizeof name, "step-%06ld", run.state.step);
    const std::string folder = path_in(out, name), temporary = folder + ".tmp";
    const RunSettings& settings = model.settings();
    const bool writes = settings.rank == 0;
    std::error_code ignored;  // after an error here, writing fails, too
    if (writes) {
        fs::remove_all(temporary, ignored);
        fs::create_directories(temporary, ignored);
    }
    std::string error;
    try {
        write_files(temporary, model, run, other_files);
        if (writes) {
            const bool saved_before = fs::exists(folder);  // then `out` could not be synced that time
            if (!saved_before) fs::rename(temporary, folder);
            sync(out);
            remove_older(out, keep);
        }
    } catch (const std::exception& failure) {
        error = failure.what();
        if (writes) fs::remove_all(temporary, ignored);
    }
    if (settings.communicator) error = settings.communicator->all_gather(error).front();
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
    for (const std::string& name : HASHED_FILES)
        if (hashes.get<std::string>(name) != hash_file(path_in(checkpoint, name)))
            throw Error(path_in(checkpoint, name),
                        " is not the file that was saved: trainer.json has another hash.");
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
    if (found.skipped.empty())
        throw Error("--resume ", folder, " has no whole checkpoint; give another folder.");
    throw Error("--resume ", folder, " has no whole checkpoint; give another folder, with another --out: ",
                found.skipped.front().why);
}

std::string set_aside(const std::string& checkpoint) {
    std::string name = checkpoint + ".damaged";
    for (int n = 2; fs::exists(name); n++) name = concat(checkpoint, ".damaged-", n);
    fs::rename(checkpoint, name);
    return name;
}

SavedRun read_saved_run(const std::string& checkpoint) {
    const Fields trainer = read_trainer(checkpoint);
    return {
        .state = {.step = trainer.get<int64_t>("step"),
                  .updates = trainer.get<int64_t>("updates"),
                  .first_validation = trainer.get<double>("first_validation")},
        .flags = trainer.get<Fields>("settings").object,
    };
}

void load_checkpoint(const std::string& checkpoint, Model& model) {
    const RunSettings& settings = model.settings();
    const Safetensors file(path_in(checkpoint, OPTIMIZER_FILE));
    const std::vector<StateTensor> table = tensors_besides_weights(settings);
    for (const StateTensor& t : table) file.find_tensor(t.name, t.shape, t.dtype);
    load_weights(checkpoint, model);
    for (const StateTensor& t : table) {
        const HfTensor& tensor = file.find_tensor(t.name, t.shape, t.dtype);
        model.write(t.name, tensor.data + owned(settings, t).first * t.bytes);
    }
}

}  // namespace coat
