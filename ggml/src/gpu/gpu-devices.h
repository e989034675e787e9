// The devices of this process as ggml lists them, and devices of RPC servers added to them. For tools: exported from the module.
#pragma once

#include "../status.h"

#include <cstdint>
#include <string>
#include <vector>

namespace powerinfer {

struct device_info {
    std::string name;         // e.g. CUDA0
    std::string description;  // e.g. the product's name; of RPC devices the address
    std::string type;         // cpu, gpu, igpu, accel or meta
    uint64_t memory_free = 0;   // bytes; 0 of 0: the device doesn't say
    uint64_t memory_total = 0;
    bool async = false;       // it computes while the caller goes on
};

// An RPC device that lost its server ends the process: upstream aborts there.
POWERINFER_EXPORT std::vector<device_info> list_devices();

// Adds the devices of a server at "host:port"; again: no change. names: of its devices.
// The server is asked first, in a connection of our own, because upstream aborts where none answers.
POWERINFER_EXPORT status add_rpc_server(const std::string & address, std::vector<std::string> & names);

}  // namespace powerinfer
