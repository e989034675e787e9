// Result of everything in the core that can fail: empty text means success.
// Error text follows one form: "where: what was found; what was expected; what to do".
#pragma once

#include <string>
#include <utility>

// What the module exports beside its C API, for the Python core.
#define POWERINFER_EXPORT __attribute__((visibility("default")))

namespace powerinfer {

class [[nodiscard]] status {
public:
    status() = default;

    static status error(std::string text) {
        status result;
        result.text_ = std::move(text);
        return result;
    }

    bool ok() const { return text_.empty(); }
    const std::string & text() const { return text_; }

private:
    std::string text_;
};

}  // namespace powerinfer
