// data/json.h - JSON files: parsed within limits, and their fields checked.
//
// config.json, an index of shards, a vocabulary or the header of a safetensors file may come from anywhere.
// What is wrong in one is an Error that names the file and the field.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>
#include <nlohmann/json.hpp>

#include "file.h"

namespace coat {

// The JSON object in a text. The JSON library parses nested values iteratively, but prints, copies and
// compares them recursively, and its objects take many times the memory of the text. So depth and number of
// values are limited before it parses. (Its own callbacks take quadratic time.) On success *why is empty;
// otherwise it says what is wrong ("is not a JSON object").
nlohmann::json parse_json(const void* data, int64_t bytes, std::string* why,
                          int64_t max_values = 5'000'000);

// The fields of one JSON object. A field that is null counts as missing, as in Hugging Face's config.json.
struct Fields {
    std::string path;  // of the file, for errors
    nlohmann::json object;

    template <class... Parts>
    [[noreturn]] void reject(const std::string& field, const Parts&... what) const {
        throw Error(path, ": field ", field, " ", what..., ".");
    }
    static std::string excerpt(const nlohmann::json& value);
    bool has(const std::string& field) const { return object.contains(field) && !object[field].is_null(); }
    const nlohmann::json& at(const std::string& field) const {
        if (!has(field)) reject(field, "is missing; download or save the folder again");
        return object[field];
    }
    // The field's value as a T, which `ok` accepts; `kind` says what it accepts. A missing field is
    // `otherwise`, or an Error if there is none.
    template <class T, class Accept>
    T value(const std::string& field, const char* kind, Accept ok, std::optional<T> otherwise = {}) const {
        if (otherwise && !has(field)) return *otherwise;
        const nlohmann::json& found = at(field);
        if (!ok(found)) reject(field, "must be ", kind, ", not ", excerpt(found), "; correct it");
        return found.get<T>();
    }
    // At most 10^15, far below 2^63: sums do not overflow.
    static bool is_natural(const nlohmann::json& x) {
        return x.is_number_unsigned() && x.get<uint64_t>() <= 1'000'000'000'000'000;
    }
    int64_t natural(const std::string& field, std::optional<int64_t> otherwise = {}) const {
        return value(field, "a whole number up to 10^15", is_natural, otherwise);
    }
    std::vector<int64_t> naturals(const std::string& field) const {
        auto ok = [](const nlohmann::json& x) {
            return x.is_array() && std::all_of(x.begin(), x.end(), is_natural);
        };
        return value<std::vector<int64_t>>(field, "a list of whole numbers up to 10^15", ok);
    }
    float positive(const std::string& field, std::optional<float> otherwise = {}) const {
        auto ok = [](const nlohmann::json& x) {
            return x.is_number() && x.get<float>() > 0 && std::isfinite(x.get<float>());
        };
        return value(field, "a positive number", ok, otherwise);
    }
    bool boolean(const std::string& field, bool otherwise) const {
        auto ok = [](const nlohmann::json& x) { return x.is_boolean(); };
        return value<bool>(field, "a boolean", ok, otherwise);
    }
    std::string text(const std::string& field) const {
        return value<std::string>(field, "text", [](const nlohmann::json& x) { return x.is_string(); });
    }
    // The object in this field; one without fields if it is missing.
    Fields inner(const std::string& field) const {
        auto ok = [](const nlohmann::json& x) { return x.is_object(); };
        return {path, value<nlohmann::json>(field, "an object", ok, nlohmann::json::object())};
    }
};

Fields read_json(const std::string& path);
void write_json(const std::string& path, const nlohmann::ordered_json& value);

}  // namespace coat
