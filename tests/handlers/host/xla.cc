#include "xla.h"

#include <algorithm>

#include "machine.h"

struct XLA_FFI_Error {
  std::string message;
  XLA_FFI_Error_Code code;
};

struct XLA_FFI_CollectivesState {
  xla_side::Runtime* runtime;
  int device;
};

struct XLA_FFI_InvokeContext {
  int device;
  int64_t run_id;
  const XLA_FFI_Collectives_Extension* collectives;  // null: there is none
};

namespace xla_side {
namespace {

std::atomic<int> errors{0};

XLA_FFI_Error* make_error(XLA_FFI_Error_Code code, std::string message) {
  errors++;
  return new XLA_FFI_Error{std::move(message), code};
}

void destroy_error(XLA_FFI_Error* error) {
  errors--;
  delete error;
}

XLA_FFI_Api make_api() {
  XLA_FFI_Api api{};
  api.struct_size = XLA_FFI_Api_STRUCT_SIZE;
  api.api_version = {XLA_FFI_Api_Version_STRUCT_SIZE, nullptr, XLA_FFI_API_MAJOR,
                     XLA_FFI_API_MINOR};
  api.XLA_FFI_Error_Create = [](XLA_FFI_Error_Create_Args* args) {
    return make_error(args->errc, args->message);
  };
  api.XLA_FFI_Error_GetDetails = [](XLA_FFI_Error_GetDetails_Args* args) {
    args->message = args->error->message.c_str();
    args->errc = args->error->code;
  };
  api.XLA_FFI_Error_Destroy = [](XLA_FFI_Error_Destroy_Args* args) { destroy_error(args->error); };
  api.XLA_FFI_Stream_Get = [](XLA_FFI_Stream_Get_Args* args) -> XLA_FFI_Error* {
    args->stream = machine::stream_of(args->ctx->device);
    return nullptr;
  };
  api.XLA_FFI_RunId_Get = [](XLA_FFI_RunId_Get_Args* args) -> XLA_FFI_Error* {
    args->run_id = args->ctx->run_id;
    return nullptr;
  };
  api.XLA_FFI_DeviceOrdinal_Get = [](XLA_FFI_DeviceOrdinal_Get_Args* args) -> XLA_FFI_Error* {
    args->device_ordinal = args->ctx->device;
    return nullptr;
  };
  api.XLA_FFI_InvokeContext_FindExtension =
      [](XLA_FFI_InvokeContext_FindExtension_Args* args) -> XLA_FFI_Error* {
    const bool found = args->extension_type == XLA_FFI_Extension_Collectives;
    args->extension = found && args->ctx->collectives != nullptr
                          ? &args->ctx->collectives->extension_base
                          : nullptr;
    return nullptr;
  };
  return api;
}

// The C structs that show a CustomCall, for as long as it lives.
class Shown {
 public:
  explicit Shown(CustomCall& call) {
    for (Buffer& buffer : call.operands) operands_.push_back(show(buffer));
    for (Buffer& buffer : call.results) results_.push_back(show(buffer));
    for (auto& [name, value] : call.attributes) add(attributes_, name, value);
  }

  void fill(XLA_FFI_CallFrame& frame) {
    const auto size = [](const auto& list) { return static_cast<int64_t>(list.size()); };
    arg_types_.assign(operands_.size(), XLA_FFI_ArgType_BUFFER);
    ret_types_.assign(results_.size(), XLA_FFI_RetType_BUFFER);
    frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, size(operands_), arg_types_.data(),
                  operands_.data()};
    frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, size(results_), ret_types_.data(),
                  results_.data()};
    frame.attrs = attributes_.shown();
  }

 private:
  struct List {
    std::vector<XLA_FFI_AttrType> types;
    std::vector<XLA_FFI_ByteSpan*> names;
    std::vector<void*> values;

    XLA_FFI_Attrs shown() {
      return {XLA_FFI_Attrs_STRUCT_SIZE,
              nullptr,
              static_cast<int64_t>(types.size()),
              types.data(),
              names.data(),
              values.data()};
    }
  };

  void* show(Buffer& buffer) {
    return &buffers_.emplace_back(
        XLA_FFI_Buffer{XLA_FFI_Buffer_STRUCT_SIZE, nullptr, buffer.dtype, buffer.data,
                       static_cast<int64_t>(buffer.sizes.size()), buffer.sizes.data()});
  }

  void add(List& list, const std::string& name, XLA_FFI_AttrType type, void* value) {
    list.types.push_back(type);
    list.names.push_back(&names_.emplace_back(XLA_FFI_ByteSpan{name.data(), name.size()}));
    list.values.push_back(value);
  }

  void add(List& list, const std::string& name, int64_t& value) {
    add(list, name, XLA_FFI_AttrType_SCALAR,
        &scalars_.emplace_back(XLA_FFI_Scalar{XLA_FFI_DataType_S64, &value}));
  }

  void add(List& list, const std::string& name, Attribute& value) {
    if (auto* scalar = std::get_if<int64_t>(&value)) {
      add(list, name, *scalar);
    } else if (auto* array = std::get_if<std::vector<int64_t>>(&value)) {
      add(list, name, XLA_FFI_AttrType_ARRAY,
          &arrays_.emplace_back(XLA_FFI_Array{XLA_FFI_DataType_S64, array->size(), array->data()}));
    } else {
      List& fields = dictionaries_.emplace_back();
      for (auto& [field, number] : std::get<std::map<std::string, int64_t>>(value)) {
        add(fields, field, number);
      }
      add(list, name, XLA_FFI_AttrType_DICTIONARY, &structs_.emplace_back(fields.shown()));
    }
  }

  // Deques: what is in them does not move.
  std::deque<XLA_FFI_Buffer> buffers_;
  std::deque<XLA_FFI_ByteSpan> names_;
  std::deque<XLA_FFI_Scalar> scalars_;
  std::deque<XLA_FFI_Array> arrays_;
  std::deque<XLA_FFI_Attrs> structs_;
  std::deque<List> dictionaries_;
  std::vector<void*> operands_, results_;
  std::vector<XLA_FFI_ArgType> arg_types_;
  std::vector<XLA_FFI_RetType> ret_types_;
  List attributes_;
};

// The group that a device is in, and its place there.
std::vector<int64_t> group_of(int device, const XLA_FFI_ReplicaGroup* groups, size_t num_groups) {
  for (size_t i = 0; i < num_groups; i++) {
    std::vector<int64_t> ids(groups[i].ids, groups[i].ids + groups[i].size);
    if (std::find(ids.begin(), ids.end(), device) != ids.end()) return ids;
  }
  return {};
}

}  // namespace

int num_errors() { return errors.load(); }

XLA_FFI_Error* Runtime::request(int device, const XLA_FFI_Communicator_Request_Args& args) {
  if (collectives == Collectives::kRefusing) {
    return make_error(XLA_FFI_Error_Code_UNIMPLEMENTED, "no cliques today");
  }
  const std::vector<int64_t> ids = group_of(device, args.groups, args.num_groups);
  const std::lock_guard lock(mutex_);
  Member& member = cliques_[ids];
  if (member.of_rank.empty()) {
    const int num_ranks = static_cast<int>(ids.size());
    for (int rank = 0; rank < num_ranks; rank++) {
      if (collectives == Collectives::kOtherSize) {
        member.of_rank.push_back({&member.cliques.emplace_back(), 0, 1});
      } else {
        member.of_rank.push_back({&member.cliques.front(), rank, num_ranks});
      }
    }
  }
  return nullptr;
}

XLA_FFI_Error* Runtime::communicator(int device, XLA_FFI_Communicator_Get_Args& args) {
  const std::vector<int64_t> ids = group_of(device, args.groups, args.num_groups);
  const std::lock_guard lock(mutex_);
  const auto found = cliques_.find(ids);
  const auto place = std::find(ids.begin(), ids.end(), device);
  if (found == cliques_.end() || place == ids.end()) {
    return make_error(XLA_FFI_Error_Code_NOT_FOUND, "nobody has requested this clique");
  }
  Communicator& communicator = found->second.of_rank[place - ids.begin()];
  args.communicator = reinterpret_cast<XLA_FFI_Communicator*>(&communicator);
  return nullptr;
}

void Runtime::shuffle_communicators() {
  const std::lock_guard lock(mutex_);
  for (auto& [ids, member] : cliques_) std::swap(member.of_rank.front(), member.of_rank.back());
}

bool Runtime::may_be_captured(XLA_FFI_Handler* handler) {
  static const XLA_FFI_Api api = make_api();
  XLA_FFI_Metadata metadata{};
  metadata.struct_size = XLA_FFI_Metadata_STRUCT_SIZE;
  XLA_FFI_Metadata_Extension asked{};
  asked.extension_base = {XLA_FFI_Metadata_Extension_STRUCT_SIZE, XLA_FFI_Extension_Metadata,
                          nullptr};
  asked.metadata = &metadata;
  XLA_FFI_CallFrame frame{};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.extension_start = &asked.extension_base;
  frame.api = &api;
  if (XLA_FFI_Error* error = handler(&frame)) {
    destroy_error(error);
    return false;
  }
  return (metadata.traits & XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE) != 0;
}

std::string Runtime::run(XLA_FFI_Handler* handler, XLA_FFI_ExecutionStage stage, CustomCall& call,
                         int device) {
  static const XLA_FFI_Api api = make_api();
  XLA_FFI_CollectivesState state{this, device};
  XLA_FFI_Collectives_Extension extension{};
  extension.extension_base = {
      XLA_FFI_Extension_STRUCT_SIZE,
      {XLA_FFI_Extension_Collectives, XLA_FFI_Extension_Collectives_MajorVersion,
       XLA_FFI_Extension_Collectives_MinorVersion},
      nullptr};
  if (collectives == Collectives::kNewMajorVersion) extension.extension_base.id.major_version++;
  extension.state = &state;
  extension.request_communicator = [](const XLA_FFI_Collectives_Extension* self,
                                      XLA_FFI_Communicator_Request_Args* args) {
    return self->state->runtime->request(self->state->device, *args);
  };
  extension.get_communicator = [](const XLA_FFI_Collectives_Extension* self,
                                  XLA_FFI_Communicator_Get_Args* args) {
    return self->state->runtime->communicator(self->state->device, *args);
  };
  XLA_FFI_InvokeContext context{device, run_id,
                                collectives == Collectives::kMissing ? nullptr : &extension};

  XLA_FFI_CallFrame frame{};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = &api;
  frame.ctx = &context;
  frame.stage = stage;
  // Prepare and Initialize see no operands here: their handlers bind none.
  CustomCall without_operands{{}, {}, call.attributes};
  Shown shown(stage == XLA_FFI_ExecutionStage_EXECUTE ? call : without_operands);
  shown.fill(frame);
  XLA_FFI_Error* error = handler(&frame);
  if (error == nullptr) return "ok";
  std::string words = std::to_string(error->code) + " " + error->message;
  destroy_error(error);
  return words;
}

}  // namespace xla_side
