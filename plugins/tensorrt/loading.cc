// How the plugins come into a TensorRT plugin registry. TensorRT has two ways, and this one library serves both:
//
//   IPluginRegistry::loadLibrary   opens the library, asks `getCreators` for the creators and registers them itself. It
//                                  refuses, and returns null, if one of them is in the registry already.
//   dlopen, ctypes, ...            only open the library, so that it must register its creators while being opened.
//
// Which of the two is under way shows in the call stack: loadLibrary's caller of dlopen is TensorRT itself. Then
// nothing is registered here, for loadLibrary may belong to another registry than the global one, a runtime's for
// instance.
#include <dlfcn.h>
#include <link.h>
#include <unwind.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "op_specs.h"
#include "tensorrt/runtime.h"

namespace ortplugins {
namespace {

using nvinfer1::IPluginCreatorInterface;
using nvinfer1::IPluginCreatorV3One;
using Severity = nvinfer1::ILogger::Severity;

bool g_registered = false;  // in a global registry, while the library was being opened

// --- The TensorRT libraries of this process -------------------------------------------------------------------------

// TensorRT 11 took the functions for version-1 creators out of IPluginRegistry and made ILogger a versioned interface,
// which moved functions in their tables of virtual functions. To serve 10 and 11 alike, they are called by their place
// in the table.
struct Layout {
  int register_creator, get_all_creators;  // of IPluginRegistry
  int log;                                 // of ILogger
};
constexpr Layout kLayout10{12, 13, 0};
constexpr Layout kLayout11{8, 9, 4};

template <class Function>
Function virtual_function(void* object, int place) {
  return reinterpret_cast<Function>((*static_cast<void***>(object))[place]);
}

using GetObject = void* (*)();
using GetVersion = int32_t (*)();

struct Runtime {
  void* registry = nullptr;        // nvinfer1::IPluginRegistry
  GetObject get_logger = nullptr;  // of the builder or runtime made last; null if there was none
  int version = 0;  // 10000 * major + 100 * minor + patch
  bool is_rtx = false;

  // TensorRT-RTX, whose versions begin at 1.0, took the step with 1.5.
  bool is_11() const { return version >= (is_rtx ? 10500 : 110000); }
  const Layout* layout() const {
    if (is_11()) return &kLayout11;
    return version >= (is_rtx ? 10000 : 100000) ? &kLayout10 : nullptr;  // before 10 there is no IPluginV3
  }
};

std::string_view file_name(std::string_view path) { return path.substr(path.rfind('/') + 1); }

bool is_tensorrt(std::string_view path) {
  const std::string_view name = file_name(path);
  return name.starts_with("libnvinfer") || name.starts_with("libtensorrt_rtx");
}

std::vector<std::string> loaded_tensorrt_paths() {
  std::vector<std::string> paths;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* user) {
        if (is_tensorrt(info->dlpi_name)) static_cast<std::vector<std::string>*>(user)->emplace_back(info->dlpi_name);
        return 0;
      },
      &paths);
  return paths;
}

void add_runtime(void* handle, std::string_view path, std::vector<Runtime>* runtimes) {
  const auto get_registry = reinterpret_cast<GetObject>(dlsym(handle, "getPluginRegistry"));
  const auto get_version = reinterpret_cast<GetVersion>(dlsym(handle, "getInferLibVersion"));
  if (get_registry == nullptr || get_version == nullptr) return;
  Runtime runtime;
  runtime.registry = get_registry();
  runtime.get_logger = reinterpret_cast<GetObject>(dlsym(handle, "getLogger"));
  runtime.version = get_version();
  runtime.is_rtx = file_name(path).starts_with("libtensorrt_rtx");
  if (runtime.registry == nullptr) return;
  for (const Runtime& known : *runtimes) {
    if (known.registry == runtime.registry) return;  // seen through another library that depends on it
  }
  runtimes->push_back(runtime);
}

std::vector<Runtime> loaded_runtimes() {
  std::vector<Runtime> runtimes;
  for (const std::string& path : loaded_tensorrt_paths()) {
    if (void* handle = dlopen(path.c_str(), RTLD_LAZY | RTLD_NOLOAD)) {
      add_runtime(handle, path, &runtimes);
      (void)dlclose(handle);
    }
  }
  add_runtime(RTLD_DEFAULT, "", &runtimes);  // linked statically into the program
  return runtimes;
}

// A library that links TensorRT pulls it in when it is opened. To behave alike when a Python program opens this one
// before it imports tensorrt (Polygraphy does), the wheel installed beside this package is loaded, else what the loader
// finds.
void load_tensorrt(const char* own_path) {
  namespace fs = std::filesystem;
  const fs::path site = fs::path(own_path).parent_path().parent_path().parent_path();  // of site/ortplugins/lib/this.so
  for (const auto& [package, prefix] :
       {std::pair{"tensorrt_libs", "libnvinfer.so."}, std::pair{"tensorrt_rtx_libs", "libtensorrt_rtx.so."}}) {
    std::error_code ignored;
    for (const fs::directory_entry& entry : fs::directory_iterator(site / package, ignored)) {
      if (entry.path().filename().string().starts_with(prefix) && dlopen(entry.path().c_str(), RTLD_LAZY) != nullptr)
        return;
    }
  }
  for (const char* name : {"libnvinfer.so.11", "libnvinfer.so.10"}) {
    if (dlopen(name, RTLD_LAZY) != nullptr) return;
  }
}

// --- Registering ----------------------------------------------------------------------------------------------------

bool has_creator(void* registry, const Layout& layout, const IPluginCreatorV3One& wanted) {
  using GetAllCreators = IPluginCreatorInterface* const* (*)(void*, int32_t*);
  int32_t count = 0;
  IPluginCreatorInterface* const* all =
      virtual_function<GetAllCreators>(registry, layout.get_all_creators)(registry, &count);
  for (int32_t i = 0; all != nullptr && i < count; ++i) {
    if (std::strcmp(all[i]->getInterfaceInfo().kind, wanted.getInterfaceInfo().kind) != 0) continue;
    const auto& creator = static_cast<const IPluginCreatorV3One&>(*all[i]);
    if (std::strcmp(creator.getPluginName(), wanted.getPluginName()) == 0 &&
        std::strcmp(creator.getPluginVersion(), wanted.getPluginVersion()) == 0 &&
        std::strcmp(creator.getPluginNamespace(), wanted.getPluginNamespace()) == 0) {
      return true;
    }
  }
  return false;
}

void register_creators(const Runtime& runtime) {
  using RegisterCreator = bool (*)(void*, IPluginCreatorInterface*, const char*);
  const Layout* layout = runtime.layout();
  if (layout == nullptr) {
    log(Severity::kERROR, "needs TensorRT 10 or newer");
    return;
  }
  for (IPluginCreatorInterface* creator : plugin_creators()) {
    const auto& v3 = static_cast<const IPluginCreatorV3One&>(*creator);
    if (has_creator(runtime.registry, *layout, v3)) {
      log(Severity::kINFO, std::string("plugin ") + v3.getPluginName() +
                               " is registered already, by another copy of this library; that one stays");
    } else if (virtual_function<RegisterCreator>(runtime.registry, layout->register_creator)(runtime.registry, creator,
                                                                                             kDomain)) {
      g_registered = true;
    } else {
      log(Severity::kERROR, std::string("TensorRT did not register plugin ") + v3.getPluginName());
    }
  }
}

// --- Opening --------------------------------------------------------------------------------------------------------

struct Walk {
  const void* own_base = nullptr;
  std::string caller;
};

// The first caller outside of this library and of the C library, whose parts carry out dlopen.
std::string caller_of_dlopen(const void* own_base) {
  Walk walk{own_base, {}};
  (void)_Unwind_Backtrace(
      [](_Unwind_Context* context, void* user) {
        auto* const state = static_cast<Walk*>(user);
        Dl_info info{};
        if (dladdr(reinterpret_cast<void*>(_Unwind_GetIP(context)), &info) == 0 || info.dli_fbase == state->own_base)
          return _URC_NO_REASON;
        const std::string_view name = file_name(info.dli_fname);
        for (const char* part : {"ld-linux", "ld-musl", "libc.", "libc-", "libdl."}) {
          if (name.starts_with(part)) return _URC_NO_REASON;
        }
        state->caller = info.dli_fname;
        return _URC_END_OF_STACK;
      },
      &walk);
  return walk.caller;
}

const struct OnOpen {
  OnOpen() noexcept {
    try {
      Dl_info self{};
      if (dladdr(&g_registered, &self) == 0 || is_tensorrt(caller_of_dlopen(self.dli_fbase))) return;
      std::vector<Runtime> runtimes = loaded_runtimes();
      if (runtimes.empty()) {
        load_tensorrt(self.dli_fname);
        runtimes = loaded_runtimes();
      }
      for (const Runtime& runtime : runtimes) register_creators(runtime);
    } catch (...) {  // out of memory: the plugins are missing, which TensorRT reports when one is asked for
    }
  }
} g_on_open;

}  // namespace

void log(Severity severity, const std::string& text) noexcept {
  try {
    const std::string line = "[ortplugins] " + text;
    for (const Runtime& runtime : loaded_runtimes()) {
      void* logger = runtime.get_logger == nullptr ? nullptr : runtime.get_logger();
      if (logger == nullptr || runtime.layout() == nullptr) continue;
      virtual_function<void (*)(void*, Severity, const char*)>(logger, runtime.layout()->log)(logger, severity,
                                                                                              line.c_str());
      return;
    }
    if (severity <= Severity::kWARNING) (void)std::fprintf(stderr, "%s\n", line.c_str());
  } catch (...) {  // a message that cannot be written is not worth ending the process
  }
}

bool types_are_given() noexcept {
  try {
    const std::vector<Runtime> runtimes = loaded_runtimes();
    return std::all_of(runtimes.begin(), runtimes.end(), [](const Runtime& r) { return r.is_rtx || r.is_11(); });
  } catch (...) {
    return false;
  }
}

}  // namespace ortplugins

// loadLibrary asks for this function to be there. All that TensorRT's finder does is to call getLogger, as `log` does.
extern "C" __attribute__((visibility("default"))) void setLoggerFinder(nvinfer1::ILoggerFinder*) {}

extern "C" __attribute__((visibility("default"))) nvinfer1::IPluginCreatorInterface* const* getCreators(
    int32_t& count) {
  using namespace ortplugins;
  if (g_registered) {
    log(nvinfer1::ILogger::Severity::kWARNING,
        "this library was opened with dlopen before, which registered its plugins with TensorRT's global registry, "
        "where they can be "
        "used. If it is that registry that now loads the library, it finds them taken and loadLibrary returns null.");
  }
  count = static_cast<int32_t>(plugin_creators().size());
  return plugin_creators().data();
}
