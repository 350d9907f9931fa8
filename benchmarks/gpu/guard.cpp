// Lets a CPU build of torch handle fake CUDA tensors, autograd included: a device guard that does nothing, hooks that say
// that there is one device, and CUDA as the accelerator. Preloaded, because it replaces a function of libtorch. Nothing
// can be computed with it.
#include <ATen/DeviceAccelerator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

using c10::Device, c10::DeviceIndex, c10::DeviceType, c10::Stream;

namespace {

const Device kDevice(DeviceType::CUDA, 0);

struct IdleGuard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  Device getDevice() const override { return kDevice; }
  Device exchangeDevice(Device) const override { return kDevice; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}

  Stream getStream(Device d) const noexcept override { return Stream(Stream::DEFAULT, d); }
  Stream getDefaultStream(Device d) const override { return Stream(Stream::DEFAULT, d); }
  Stream getStreamFromGlobalPool(Device d, bool = false) const override { return Stream(Stream::DEFAULT, d); }
  Stream getNewStream(Device d, int = 0) const override { return Stream(Stream::DEFAULT, d); }
  Stream exchangeStream(Stream s) const noexcept override { return s; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}

  void record(void** event, const Stream&, const DeviceIndex, const c10::EventFlag) const override {
    *event = const_cast<Device*>(&kDevice);  // any address: it is never followed
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
};

IdleGuard guard;
const bool registered = [] {
  c10::impl::device_guard_impl_registry[static_cast<size_t>(DeviceType::CUDA)].store(&guard);
  return true;
}();

struct CUDAHooks : at::CUDAHooksInterface {  // torch looks for this name
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
};

}  // namespace

namespace at::accelerator {
std::optional<DeviceType> getAccelerator(bool) { return DeviceType::CUDA; }
}  // namespace at::accelerator

using at::CUDAHooksRegistry, at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks)
