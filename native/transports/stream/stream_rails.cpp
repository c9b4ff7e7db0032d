#include "transports/stream/stream_rails.h"

#include <string>
#include <utility>

#include "gpu/gpu_part.h"
#include "transports/stream/staged_transport.h"
#include "transports/stream/stream_round.h"
#include "transports/stream/stream_transport.h"

namespace kvxfer::stream {

Result<std::vector<std::unique_ptr<Transport>>> make_rails(const RailParts& parts, const TransportKind& kind,
                                                           std::int64_t num_rails) {
  std::shared_ptr<Staging> staging;
  if (!parts.gpus.empty() && parts.gpus.front().staging_nbytes != 0) {
    const GpuPart& part = parts.gpus.front();
    if (part.staging_nbytes < GpuPart::kLeastStagingNbytes)
      return Status(Code::kInvalidArgument, "a staging arena of " + std::to_string(part.staging_nbytes) +
                                                " bytes is too small: it must have at least " +
                                                std::to_string(GpuPart::kLeastStagingNbytes) +
                                                ", or 0 for none");
    staging = parts.shared.get<Staging>([&] {
      gpu::CopyStreamOptions copies = part.stream;
      copies.num_ctas = part.staging_ctas;
      return std::make_shared<Staging>(*part.driver, Staging::Options{.device = part.device,
                                                                      .kernels = part.kernels,
                                                                      .stream = copies,
                                                                      .nbytes = part.staging_nbytes});
    });
  }
  std::shared_ptr<StreamRound> round;
  if (parts.workers != nullptr)
    round = parts.shared.get<StreamRound>([&] { return std::make_shared<StreamRound>(parts.workers); });
  StreamTransport::Options options;
  options.name = kind.name;
  std::vector<std::unique_ptr<Transport>> rails;
  for (std::int64_t i = 0; i < num_rails; ++i) {
    auto rail = std::make_unique<StreamTransport>(parts.reactor, options, round);
    if (staging == nullptr)
      rails.push_back(std::move(rail));
    else
      rails.push_back(std::make_unique<StagedTransport>(std::move(rail), staging));
  }
  return rails;
}

}  // namespace kvxfer::stream
