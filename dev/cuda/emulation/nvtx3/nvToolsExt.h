// NVTX for a CPU: ranges for a profiler's timeline, which do nothing here.
#pragma once

typedef struct EmulationDomain* nvtxDomainHandle_t;
struct nvtxEventAttributes_t {
    unsigned short version, size;
    int messageType;
    union {
        const char* ascii;
    } message;
};
enum { NVTX_VERSION = 3, NVTX_EVENT_ATTRIB_STRUCT_SIZE = sizeof(nvtxEventAttributes_t), NVTX_MESSAGE_TYPE_ASCII = 1 };
inline nvtxDomainHandle_t nvtxDomainCreateA(const char*) { return 0; }
inline int nvtxDomainRangePushEx(nvtxDomainHandle_t, const nvtxEventAttributes_t*) { return 0; }
inline int nvtxDomainRangePop(nvtxDomainHandle_t) { return 0; }
