// The stand-in's green contexts. A resource's SMs are bits in its opaque part.
#include "api.h"
#include "cuda_api.h"

using namespace stand_in;
using conflux::DevResource;
using conflux::SmGroupParams;

namespace {

struct Green {
    Sms sms;
};

DevResource resource_of(const Sms& sms) {
    DevResource resource{};
    resource.type = sms.empty() ? 0 : 1;
    for (int sm : sms) resource.internal[sm / 8] |= static_cast<unsigned char>(1u << sm % 8);
    // Drivers before 13.1 leave what follows the count alone.
    if (settings.number("VERSION", 13000) < 13010) std::memset(&resource.sm, 0xa5, sizeof resource.sm);
    resource.sm.sm_count = static_cast<unsigned>(sms.size());
    return resource;
}

Sms sms_of(const DevResource& resource) {
    Sms sms;
    for (int sm = 0; sm < 2 * tpc_count(); ++sm)
        if (resource.internal[sm / 8] >> sm % 8 & 1) sms.push_back(sm);
    return sms;
}

int split(const DevResource* all, unsigned count, DevResource* group, DevResource* rest) {
    Sms sms;
    for (const auto& gpc : gpcs())
        for (int tpc : gpc) sms.insert(sms.end(), {2 * tpc, 2 * tpc + 1});
    if (all->type != 1 || count > all->sm.sm_count) return 915;
    if (group) *group = resource_of(Sms(sms.begin(), sms.begin() + count));
    if (rest) *rest = resource_of(Sms(sms.begin() + count, sms.end()));
    return kOk;
}

unsigned rounded(unsigned count, unsigned least, unsigned step) {
    return count <= least ? least : least + (count - least + step - 1) / step * step;
}

}  // namespace

extern "C" {

int cuDeviceGetDevResource(int, DevResource* resource, int type) {
    ENTER(enter, "cuDeviceGetDevResource");
    if (type != 1) return 914;
    Sms all(static_cast<std::size_t>(2 * tpc_count()));
    for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<int>(i);
    *resource = resource_of(all);
    return kOk;
}
int cuDevSmResourceSplitByCount(DevResource* group, unsigned* groups, const DevResource* all, DevResource* rest,
                                unsigned flags, unsigned count) {
    ENTER(enter, "cuDevSmResourceSplitByCount");
    const auto least = static_cast<unsigned>(flags & 1 ? 2 : settings.number("GREEN_LEAST", 8));
    const auto step = static_cast<unsigned>(flags & 1 ? 2 : settings.number("GREEN_STEP", 8));
    *groups = 1;
    return split(all, rounded(count, least, step), group, rest);
}
int cuDevSmResourceSplit(DevResource* group, unsigned groups, const DevResource* all, DevResource* rest, unsigned flags,
                         SmGroupParams* wish) {
    ENTER(enter, "cuDevSmResourceSplit");
    const unsigned together = wish->coscheduled_sms ? wish->coscheduled_sms : 8;
    if (groups != 1 || flags || wish->sm_count % together) return kInvalidValue;
    return split(all, wish->sm_count, group, rest);
}
int cuDevResourceGenerateDesc(void** description, DevResource* resources, unsigned count) {
    ENTER(enter, "cuDevResourceGenerateDesc");
    if (count != 1 || resources->type != 1) return kInvalidValue;
    *description = new Green{sms_of(*resources)};
    return kOk;
}
int cuGreenCtxCreate(Green** green, Green* description, int, unsigned flags) {
    ENTER(enter, "cuGreenCtxCreate");
    if (flags != 1) return kInvalidValue;
    *green = new Green(*description);
    ++live["green"];
    return kOk;
}
int cuGreenCtxDestroy(Green*) { ENTER(enter, "cuGreenCtxDestroy"); --live["green"]; return kOk; }
int cuGreenCtxStreamCreate(Stream** stream, Green* green, unsigned flags, int priority) {
    ENTER(enter, "cuGreenCtxStreamCreate");
    if (flags != 1) return kInvalidValue;
    *stream = new_stream(priority, &green->sms);
    ++live["streams"];
    return kOk;
}
}
