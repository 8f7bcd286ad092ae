// Runs programs of torch operators from a table, without Python between the operators: the same operators in
// the same order as the function that `emit.py` writes, so with the same bits.
//
//     make(title, name, globals, slots, constants, arguments, calls, results) -> function
//
// A value of a program lives in a slot from the call that makes it to the one that uses it last.

#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/extension.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_foreach_add.h>
#include <atomic>
#include <chrono>
#include <set>
#include <string>
#include <typeinfo>
#include <vector>

namespace {

using c10::IValue;
using Slots = std::vector<IValue>;
constexpr int NONE = -1;                                // in the place of a slot: nothing
constexpr std::chrono::milliseconds PATIENCE(50);       // signals are looked for so often

struct Operand {
  enum Kind { CONSTANT, SLOT, TRANSPOSED, TENSORS, OPTIONAL_TENSORS } kind = CONSTANT;
  bool last = false;  // whether nothing uses the slot afterwards
  int slot = NONE;
  IValue constant;
  std::vector<int> slots;
};

struct Layout {
  c10::DimVector sizes, strides;
  int64_t offset;
};

// Tell if a tensor is described by its keys, its dtype, its memory and its layout alone.
bool is_plain(const at::Tensor& tensor) {
  return typeid(*tensor.unsafeGetTensorImpl()) == typeid(c10::TensorImpl) && tensor.layout() == at::kStrided;
}

// The first call of an operator that makes views of one tensor. For a tensor that lies in the same way, its
// views lie as they did then, and are made without the operator.
struct Views {
  enum State { UNKNOWN, LEARNING, KNOWN, OTHER };
  std::atomic<State> state{UNKNOWN};
  bool made_here = false;  // the tensor is a result of an operator, of which nobody outside knows
  c10::DispatchKeySet keys;
  caffe2::TypeMeta dtype;
  Layout from;
  std::vector<Layout> to;

  bool fit(const c10::TensorImpl& of) const {
    return of.key_set() == keys && of.storage_offset() == from.offset && of.sizes() == from.sizes &&
           of.strides() == from.strides && of.dtype() == dtype;
  }

  void learn(const at::Tensor& of, const std::vector<at::Tensor>& views) {
    auto unknown = UNKNOWN;
    if (!state.compare_exchange_strong(unknown, LEARNING)) return;
    bool plain = is_plain(of);
    for (const auto& view : views)
      plain = plain && view.has_storage() && view.is_alias_of(of) && view.key_set() == of.key_set() &&
              view.dtype() == of.dtype();
    if (plain) {
      keys = of.key_set();
      dtype = of.dtype();
      from = layout(of);
      for (const auto& view : views) to.push_back(layout(view));
    }
    state = plain ? KNOWN : OTHER;
  }

  static Layout layout(const at::Tensor& tensor) {
    return {c10::DimVector(tensor.sizes()), c10::DimVector(tensor.strides()), tensor.storage_offset()};
  }
};

struct Call {
  std::optional<c10::OperatorHandle> op;  // none: `sums.add(gradients, ...)` of Python, or sums in place
  bool foreign = false;      // whether its kernels may be Python's, which may differentiate
  std::unique_ptr<Views> views;
  std::vector<Operand> operands;
  std::vector<int> results;  // slots, one for each
  bool one_list = false;     // whether the results come as one list of tensors
  std::vector<int> dead;     // slots that nothing uses afterwards, unless an operand takes them along
  std::vector<int> gradients, numbers;  // of the leaves
  py::tuple more;            // further arguments of `add`
};

struct Argument {
  std::vector<int> slots;
  bool settle;  // make tensors contiguous
};

struct Program {
  std::string title, name;
  py::dict globals;
  Slots initial;  // constants in their slots
  std::vector<Argument> arguments;
  int sums = NONE;  // the number of the argument that gradients are added to
  std::vector<Call> calls;
  std::vector<std::vector<int>> results;
};

Operand read_operand(const py::tuple& text, const c10::Argument& argument) {
  Operand operand;
  auto kind = text[0].cast<std::string>();
  if (kind == "default") {
    TORCH_CHECK(argument.default_value(), argument.name(), " has no default");
    operand.constant = *argument.default_value();
  } else if (kind == "constant") {
    torch::jit::ToIValueAllowNumbersAsTensors numbers(true);
    operand.constant = torch::jit::toIValue(text[1], argument.real_type());
  } else if (kind == "slot" || kind == "transposed") {
    operand.kind = kind == "slot" ? Operand::SLOT : Operand::TRANSPOSED;
    operand.slot = text[1].cast<int>();
    operand.last = text[2].cast<bool>();
  } else {
    auto optional = argument.type()->castRaw<c10::ListType>();
    TORCH_CHECK(optional, argument.name(), " is no list");
    bool may_miss = optional->getElementType()->kind() == c10::TypeKind::OptionalType;
    operand.kind = may_miss ? Operand::OPTIONAL_TENSORS : Operand::TENSORS;
    operand.slots = text[1].cast<std::vector<int>>();
  }
  return operand;
}

Call read_call(const py::tuple& text) {
  Call call;
  auto [name, operands, results, one_list, dead] =
      text.cast<std::tuple<py::object, py::tuple, std::vector<int>, bool, std::vector<int>>>();
  call.results = results;
  call.one_list = one_list;
  call.dead = dead;
  if (name.is_none()) {
    call.gradients = operands[0].cast<std::vector<int>>();
    call.more = operands[1].cast<py::tuple>();
    call.numbers = call.more[0].cast<std::vector<int>>();
    return call;
  }
  auto [op, overload] = name.cast<std::pair<std::string, std::string>>();
  call.op = c10::Dispatcher::singleton().findSchemaOrThrow(op.c_str(), overload.c_str());
  call.foreign = !op.starts_with("aten::");
  const auto& arguments = call.op->schema().arguments();
  TORCH_CHECK(arguments.size() == operands.size(), op, ": wrong number of operands");
  for (size_t n = 0; n < arguments.size(); n++)
    call.operands.push_back(read_operand(operands[n].cast<py::tuple>(), arguments[n]));
  // It names what its results may share memory with. `as_strided` depends on the size of the memory, too.
  const auto* shared = arguments.empty() ? nullptr : arguments[0].alias_info();
  bool one = !call.foreign && op != "aten::as_strided" && call.op->schema().returns().size() == 1 && shared &&
             !shared->isWrite() && call.operands[0].kind == Operand::SLOT;
  for (size_t n = 1; n < arguments.size(); n++) one &= call.operands[n].kind == Operand::CONSTANT;
  if (one) call.views = std::make_unique<Views>();
  return call;
}

// Tell if nobody but this call refers to an argument.
bool is_own(PyObject* given) {
#if PY_VERSION_HEX >= 0x030E0000
  // Since Python 3.14 a caller lends the tuples of its variables without counting another reference.
  return PyUnstable_Object_IsUniqueReferencedTemporary(given);
#else
  return Py_REFCNT(given) == 1;
#endif
}

// Take the tensors of an argument; one that nobody else refers to is emptied, so that they end with their slots.
void take(PyObject* given, const Argument& argument, Slots& slots) {
  bool own = is_own(given);
  for (size_t n = 0; n < argument.slots.size(); n++) {
    PyObject* item = PyTuple_GET_ITEM(given, n);
    if (argument.slots[n] != NONE) {
      TORCH_CHECK_TYPE(THPVariable_Check(item), "expected a tensor, got ", Py_TYPE(item)->tp_name);
      auto tensor = THPVariable_Unpack(item);
      if (argument.settle) tensor = tensor.resolve_conj().contiguous();
      slots[argument.slots[n]] = std::move(tensor);
    }
    if (own) {
      PyTuple_SET_ITEM(given, n, Py_NewRef(Py_None));
      Py_DECREF(item);
    }
  }
}

IValue listed(const Operand& operand, const Slots& slots) {
  if (operand.kind == Operand::TENSORS) {
    c10::List<at::Tensor> tensors;
    for (int slot : operand.slots) tensors.push_back(slots[slot].toTensor());
    return tensors;
  }
  c10::List<std::optional<at::Tensor>> tensors;
  for (int slot : operand.slots)
    tensors.push_back(slot == NONE ? std::nullopt : std::optional<at::Tensor>(slots[slot].toTensor()));
  return tensors;
}

at::Tensor view_of(const at::Tensor& tensor, const Layout& layout) {
  auto view = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(tensor.storage()),
                                                       tensor.key_set(), tensor.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(layout.sizes, layout.strides, layout.offset);
  return view;
}

at::Tensor transposed(const at::Tensor& of) {
  if (of.dim() != 2 || !is_plain(of)) return of.t();
  return view_of(of, {{of.size(1), of.size(0)}, {of.stride(1), of.stride(0)}, of.storage_offset()});
}

// Make the views of a call as they were made before; false where the tensor lies otherwise, or none were made.
bool view_again(const Call& call, Slots& slots) {
  const auto& views = *call.views;
  if (views.state != Views::KNOWN) return false;
  const auto& operand = call.operands[0];
  auto& slot = slots[operand.slot];
  const auto& tensor = slot.toTensor();
  auto* impl = tensor.unsafeGetTensorImpl();
  if (!views.fit(*impl)) return false;
  if (operand.last && views.made_here && views.to.size() == 1 && tensor.use_count() == 1 &&
      impl->allow_tensor_metadata_change()) {
    impl->set_sizes_and_strides(views.to[0].sizes, views.to[0].strides, views.to[0].offset);
    if (call.results[0] != NONE) slots[call.results[0]] = std::move(slot);
  } else {
    for (size_t n = 0; n < views.to.size(); n++)
      if (call.results[n] != NONE) slots[call.results[n]] = view_of(tensor, views.to[n]);
  }
  if (operand.last) slot = IValue();
  for (int dead : call.dead) slots[dead] = IValue();
  return true;
}

void run(const Call& call, Slots& slots, torch::jit::Stack& stack) {
  if (call.views && view_again(call, slots)) return;
  stack.clear();
  for (const auto& operand : call.operands) {
    if (operand.kind == Operand::CONSTANT) stack.push_back(operand.constant);
    else if (operand.kind == Operand::SLOT && operand.last) stack.push_back(std::move(slots[operand.slot]));
    else if (operand.kind == Operand::SLOT) stack.push_back(slots[operand.slot]);
    else if (operand.kind == Operand::TRANSPOSED) stack.push_back(transposed(slots[operand.slot].toTensor()));
    else stack.push_back(listed(operand, slots));
    if (operand.last) slots[operand.slot] = IValue();
  }
  auto of = call.views && call.views->state == Views::UNKNOWN ? stack[0].toTensor() : at::Tensor();
  if (call.foreign) {
    call.op->callBoxed(stack);
  } else {
    at::AutoDispatchBelowADInplaceOrView below;  // no operator of a table writes into its arguments
    call.op->callBoxed(stack);
  }
  if (of.defined())
    call.views->learn(of, call.one_list ? stack[0].toTensorVector() : std::vector{stack[0].toTensor()});
  if (call.one_list) {
    auto results = stack[0].toTensorVector();
    TORCH_CHECK(results.size() == call.results.size(), "the operator returned another number of tensors");
    for (size_t n = 0; n < results.size(); n++)
      if (call.results[n] != NONE) slots[call.results[n]] = std::move(results[n]);
  } else {
    for (size_t n = 0; n < call.results.size(); n++)
      if (call.results[n] != NONE) slots[call.results[n]] = std::move(stack[n]);
  }
  stack.clear();
  for (int slot : call.dead) slots[slot] = IValue();
}

py::tuple wrapped(const std::vector<int>& numbers, const Slots& slots) {
  py::tuple tensors(numbers.size());
  for (size_t n = 0; n < numbers.size(); n++)
    tensors[n] = numbers[n] == NONE
        ? py::none().cast<py::object>()
        : py::reinterpret_steal<py::object>(THPVariable_Wrap(slots[numbers[n]].toTensor()));
  return tensors;
}

// Read the sums that may be written, by number of the leaf; none where Python adds.
std::vector<at::Tensor> read_totals(PyObject* into) {
  auto totals = py::handle(into).cast<py::tuple>()[2].cast<py::object>();
  std::vector<at::Tensor> tensors;
  if (!totals.is_none())
    for (auto each : totals.cast<py::tuple>())
      tensors.push_back(each.is_none() ? at::Tensor() : THPVariable_Unpack(each.ptr()));
  return tensors;
}

bool add_in_place(const Call& call, Slots& slots, const std::vector<at::Tensor>& totals) {
  std::vector<at::Tensor> into, gradients;
  for (size_t n = 0; n < call.numbers.size(); n++) {
    auto number = static_cast<size_t>(call.numbers[n]);
    if (number >= totals.size() || !totals[number].defined()) return false;
    into.push_back(totals[number]);
    gradients.push_back(slots[call.gradients[n]].toTensor());
  }
  at::AutoDispatchBelowADInplaceOrView below;
  at::_foreach_add_(into, gradients);
  for (int slot : call.dead) slots[slot] = IValue();
  return true;
}

void add_up(const Call& call, Slots& slots, PyObject* into) {
  py::gil_scoped_acquire gil;
  auto gradients = wrapped(call.gradients, slots);
  for (int slot : call.dead) slots[slot] = IValue();
  auto given = py::handle(into).cast<py::tuple>();
  py::object sums = given[0], microbatch = given[1];
  py::object add = sums.attr("add");
  PyObject* arguments[] = {gradients.release().ptr(), call.more[0].ptr(), microbatch.ptr(), call.more[1].ptr()};
  PyObject* done = PyObject_Vectorcall(add.ptr(), arguments, 4, nullptr);
  Py_DECREF(arguments[0]);
  if (done == nullptr) throw py::error_already_set();
  Py_DECREF(done);
}

void run_all(const Program& program, Slots& slots, PyObject* into, size_t& at) {
  auto totals = into == nullptr ? std::vector<at::Tensor>() : read_totals(into);
  py::gil_scoped_release no_gil;
  c10::impl::ExcludeDispatchKeyGuard casts(c10::autocast_dispatch_keyset);  // they are operators of the table
  torch::jit::Stack stack;
  auto looked = std::chrono::steady_clock::now();
  for (at = 0; at < program.calls.size(); at++) {
    const auto& call = program.calls[at];
    if (call.op) run(call, slots, stack);
    else if (!add_in_place(call, slots, totals)) add_up(call, slots, into);
    if (auto now = std::chrono::steady_clock::now(); now - looked > PATIENCE) {
      looked = now;
      py::gil_scoped_acquire gil;
      if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    }
  }
}

// Add the call to the traceback, as if a line of Python had made it.
void place(const Program& program, size_t line) {
  PyObject *kind, *value, *trace;
  PyErr_Fetch(&kind, &value, &trace);
  auto* code = PyCode_NewEmpty(program.title.c_str(), program.name.c_str(), static_cast<int>(line));
  auto* frame = code ? PyFrame_New(PyThreadState_Get(), code, program.globals.ptr(), nullptr) : nullptr;
  PyErr_Restore(kind, value, trace);
  if (frame) PyTraceBack_Here(frame);
  Py_XDECREF(frame);
  Py_XDECREF(code);
}

PyObject* execute(PyObject* self, PyObject* const* given, Py_ssize_t count) {
  const auto& program = *static_cast<Program*>(PyCapsule_GetPointer(self, nullptr));
  size_t at = 0;
  auto call = [&]() -> PyObject* {
    HANDLE_TH_ERRORS
    TORCH_CHECK_TYPE(static_cast<size_t>(count) == program.arguments.size() + (program.sums != NONE),
                     program.name, ": wrong number of arguments");
    Slots slots = program.initial;
    for (size_t n = 0; n < program.arguments.size(); n++) {
      TORCH_CHECK_TYPE(PyTuple_Check(given[n]) &&
                           static_cast<size_t>(PyTuple_GET_SIZE(given[n])) == program.arguments[n].slots.size(),
                       program.name, ": expected a tuple of ", program.arguments[n].slots.size(), " values");
      take(given[n], program.arguments[n], slots);
    }
    run_all(program, slots, program.sums == NONE ? nullptr : given[program.sums], at);
    if (program.results.size() == 1) return wrapped(program.results[0], slots).release().ptr();
    py::tuple results(program.results.size());
    for (size_t n = 0; n < program.results.size(); n++) results[n] = wrapped(program.results[n], slots);
    return results.release().ptr();
    END_HANDLE_TH_ERRORS
  };
  PyObject* result = call();
  if (result == nullptr) place(program, at + 1);
  return result;
}

PyMethodDef execute_method = {"program", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(execute)),
                              METH_FASTCALL, nullptr};

py::object make(std::string title, std::string name, py::dict globals, size_t slots,
                const std::vector<std::pair<int, at::Tensor>>& constants,
                const std::vector<std::pair<std::vector<int>, bool>>& arguments, int sums,
                const py::list& calls, std::vector<std::vector<int>> results) {
  auto program = std::make_unique<Program>();
  program->title = std::move(title);
  program->name = std::move(name);
  program->globals = std::move(globals);
  program->initial.resize(slots);
  for (const auto& [slot, tensor] : constants) program->initial[slot] = tensor;
  for (const auto& [numbers, settle] : arguments) program->arguments.push_back({numbers, settle});
  program->sums = sums;
  std::set<int> here;  // slots of results
  for (const auto& text : calls) {
    auto& call = program->calls.emplace_back(read_call(text.cast<py::tuple>()));
    if (call.views) call.views->made_here = here.contains(call.operands[0].slot);
    here.insert(call.results.begin(), call.results.end());
  }
  program->results = std::move(results);
  py::capsule owner(program.release(), [](void* it) { delete static_cast<Program*>(it); });
  return py::reinterpret_steal<py::object>(PyCFunction_New(&execute_method, owner.ptr()));
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) { module.def("make", &make); }
