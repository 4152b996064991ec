// flags.h - the command line of ./train: one table of flags that parses, checks and prints --help
// (flags.cpp).
#pragma once
#include <map>
#include <set>
#include <string>
#include <vector>
#include <nlohmann/json.hpp>

namespace coat {

enum class Value : uint8_t { None, Optional, Text, Count, Real };  // Optional: a text, which may be left out
// What --resume does: ignores the checkpoint's value; takes it unless another is given; rejects another.
enum class Resume : uint8_t { Ignore, Default, Same };

struct Flag {
    const char* name;
    Value value;
    Resume resume;
    const char *standard, *about;  // the default, and a line for --help
    double least = 0, most = 0;    // of a number
    const char* gpu = nullptr;     // the default on a GPU, if it is another

    bool number() const { return value == Value::Count || value == Value::Real; }
    bool setting() const { return number() || value == Value::Text; }
    // "a whole number from 1 to 9", for messages and --help.
    std::string limits() const;
    // The number in this text; Error if it is none, or out of range.
    double parse(const std::string& text) const;
};
const std::vector<Flag>& flag_table();
const Flag& find_flag(const std::string& name);

// The values of all flags: from the command line, else from the checkpoint, else the device's defaults.
class Flags {
public:
    void parse(int argc, char** argv);
    // Takes what is not given from a checkpoint. Error if a flag is given that would make it another run.
    void take(const nlohmann::json& saved);
    void take_defaults(bool gpu);
    void set(const std::string& name, const std::string& value) { values_[name] = value; }

    bool given(const std::string& name) const { return given_.count(name) > 0; }  // on the command line
    const std::string& text(const std::string& name) const { return values_.at(name); }
    int64_t count(const std::string& name) const { return int64_t(real(name)); }
    double real(const std::string& name) const { return find_flag(name).parse(text(name)); }

    nlohmann::ordered_json remembered() const;  // for a checkpoint: texts, exactly as they were given
    nlohmann::ordered_json typed() const;       // for the log: texts and numbers

private:
    std::map<std::string, std::string> values_;
    std::set<std::string> given_;
};

void print_help();

}  // namespace coat
