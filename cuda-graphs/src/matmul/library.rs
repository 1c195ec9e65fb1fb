//! Products by cuBLASLt: a plan for each exact shape, an algorithm for each class of shapes.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use half::bf16;

use super::{MatmulDims, MatmulElement, MatmulOptions, MatmulReport, name};
use crate::blas::{Addresses, Algorithm, BlasLt, Handle, Product};
use crate::buffer::{Allocation, DeviceBuffer, DeviceSlice};
use crate::choices::{Choice, ChoiceFile};
use crate::error::{Error, Result};
use crate::invariance::{BLOCK, Reference};
use crate::stream::Stream;
use crate::tuning::{Tuner, row_class};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct PlanKey {
    dims: MatmulDims,
    /// Elements from a row of Y to the next.
    stride: usize,
    output: std::ffi::c_int,
    residual: bool,
}

impl PlanKey {
    pub(super) fn of<T: MatmulElement>(dims: MatmulDims, stride: usize, residual: bool) -> Self {
        Self {
            dims,
            stride,
            output: T::CODE,
            residual,
        }
    }
}

/// Descriptors and algorithm of one exact shape.
#[derive(Debug)]
struct Plan {
    product: Product,
    algorithm: Algorithm,
    report: MatmulReport,
    /// Whether it has run outside a capture, so that the library's kernel is loaded.
    has_run: AtomicBool,
}

#[derive(Debug)]
struct State {
    plans: HashMap<PlanKey, Arc<Plan>>,
    /// Of products whose rows are invariant, by the key of one with no rows.
    references: HashMap<PlanKey, Reference>,
    choices: BTreeMap<String, Choice>,
}

/// The library on one stream.
#[derive(Debug)]
pub(super) struct CublasLt {
    lt: &'static BlasLt,
    handle: Handle,
    stream: Stream,
    workspace: DeviceBuffer<u8>,
    /// Nothing but a share of the workspace's memory, for graphs to keep.
    owner: Arc<Allocation>,
    algorithms: usize,
    row_invariant: bool,
    split_k: bool,
    /// Choices under other options than the default are kept apart.
    class: String,
    file: ChoiceFile,
    state: Mutex<State>,
}

impl CublasLt {
    pub(super) fn new(stream: &Stream, options: &MatmulOptions) -> Result<Self> {
        crate::capture::forbid("cublasLtCreate")?;
        let lt = BlasLt::of_process()?;
        let handle = lt.handle(stream.device())?;
        let workspace = DeviceBuffer::zeroed(stream.device(), options.workspace_bytes)?;
        let file = ChoiceFile::new(&options.cache, stream.device().info(), lt.version);
        Ok(Self {
            lt,
            handle,
            stream: stream.clone(),
            owner: workspace.as_slice().owner().clone(),
            workspace,
            algorithms: options.algorithms.max(1),
            row_invariant: options.row_invariant,
            split_k: options.split_k,
            class: options.class(),
            state: Mutex::new(State {
                plans: HashMap::new(),
                references: HashMap::new(),
                choices: file.load(),
            }),
            file,
        })
    }

    pub(super) fn version(&self) -> usize {
        self.lt.version
    }

    /// See [`Matmul::padded_rows`](super::Matmul::padded_rows).
    pub(super) fn padded_rows(&self, m: usize) -> usize {
        match self.row_invariant {
            true => m.next_multiple_of(BLOCK),
            false => m,
        }
    }

    /// Gives a product whose operands were checked to the stream.
    pub(super) fn run<T: MatmulElement>(
        &self,
        key: PlanKey,
        w: DeviceSlice<'_, bf16>,
        at: Addresses,
    ) -> Result<()> {
        let plan = self.plan::<T>(key, w)?;
        if self.stream.is_capturing() && !plan.has_run.load(Ordering::Relaxed) {
            return Err(Error::NotPrepared {
                shape: name::<T>(key.dims, key.residual),
            });
        }
        self.stream.keep(&self.owner);
        let raw = self.stream.bound()?;
        // SAFETY: lengths, alignment and device of all operands were checked by the caller; they live until the product is
        // done, since freeing waits for the device, and as long as a graph that captured it.
        unsafe {
            let workspace = (self.workspace.ptr(), self.workspace.len());
            plan.product
                .run(self.lt, &self.handle, &plan.algorithm, at, workspace, raw.cast())
        }?;
        if !self.stream.is_capturing() {
            plan.has_run.store(true, Ordering::Relaxed);
        }
        Ok(())
    }

    /// What is known of a product's algorithm, which is chosen now if it was not.
    pub(super) fn report<T: MatmulElement>(
        &self,
        key: PlanKey,
        w: DeviceSlice<'_, bf16>,
    ) -> Result<MatmulReport> {
        Ok(self.plan::<T>(key, w)?.report)
    }

    /// Descriptors and algorithm of one exact shape, made when first asked for.
    fn plan<T: MatmulElement>(&self, key: PlanKey, w: DeviceSlice<'_, bf16>) -> Result<Arc<Plan>> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(plan) = state.plans.get(&key) {
            return Ok(plan.clone());
        }
        let MatmulDims { m, n, k } = key.dims;
        let class = MatmulDims {
            m: row_class(m),
            ..key.dims
        };
        let class_name = name::<T>(class, key.residual) + &self.class;
        let product = Product::with_stride(
            self.lt,
            [m, n, k],
            key.stride,
            T::CODE,
            name::<T>(key.dims, key.residual),
        )?;
        let workspace = self.workspace.len();
        let tuner = Tuner {
            lt: self.lt,
            handle: &self.handle,
            stream: &self.stream,
            workspace: (self.workspace.ptr(), workspace),
            algorithms: self.algorithms,
            split_k: self.split_k,
        };
        let asked = Asked {
            key,
            product: &product,
            class,
            w,
        };
        let choice = match self.row_invariant {
            true => self.invariant_choice::<T>(&mut state, &tuner, &asked)?,
            false => self.fastest_choice::<T>(&mut state, &tuner, &asked, class_name)?,
        };
        let report = MatmulReport {
            microseconds: choice.microseconds,
            tried: choice.tried,
        };
        let has_run = AtomicBool::new(false);
        let plan = Arc::new(Plan {
            product,
            algorithm: choice.algorithm,
            report,
            has_run,
        });
        state.plans.insert(key, plan.clone());
        Ok(plan)
    }

    /// The fastest algorithm of the product's class, known or timed now.
    fn fastest_choice<T: MatmulElement>(
        &self,
        state: &mut State,
        tuner: &Tuner<'_>,
        asked: &Asked<'_>,
        class_name: String,
    ) -> Result<Choice> {
        let Asked {
            key,
            product,
            class,
            w,
        } = *asked;
        let workspace = self.workspace.len();
        let known = state.choices.get(&class_name).cloned();
        match known {
            Some(choice) if product.accepts(self.lt, &self.handle, &choice.algorithm, workspace) => {
                Ok(choice)
            }
            _ if tuner.stream.is_capturing() => Err(Error::NotPrepared {
                shape: name::<T>(key.dims, key.residual),
            }),
            known => {
                let of_class =
                    Product::new(self.lt, [class.m, class.n, class.k], T::CODE, class_name.clone())?;
                let fits_class =
                    |choice: &Choice| of_class.accepts(self.lt, &self.handle, &choice.algorithm, workspace);
                let choice = match known.filter(fits_class) {
                    Some(choice) => choice,
                    None => {
                        let choice = tuner.choose::<T>(&of_class, class, key.residual, w)?;
                        // One that was not timed for want of memory is tried again by the next process.
                        if choice.microseconds > 0.0 {
                            self.file.add(&class_name, &choice);
                        }
                        state.choices.insert(class_name, choice.clone());
                        choice
                    }
                };
                if product.accepts(self.lt, &self.handle, &choice.algorithm, workspace) {
                    Ok(choice)
                } else {
                    tuner.guess(product)
                }
            }
        }
    }

    /// The fastest algorithm of the product's class that gives the bits of the shape's reference.
    fn invariant_choice<T: MatmulElement>(
        &self,
        state: &mut State,
        tuner: &Tuner<'_>,
        asked: &Asked<'_>,
    ) -> Result<Choice> {
        let Asked {
            key,
            product,
            class,
            w,
        } = *asked;
        let not_prepared = || Error::NotPrepared {
            shape: name::<T>(key.dims, key.residual),
        };
        let accepts =
            |choice: &Choice| product.accepts(self.lt, &self.handle, &choice.algorithm, self.workspace.len());
        let any_rows = PlanKey {
            dims: MatmulDims { m: 0, ..key.dims },
            stride: key.dims.n,
            ..key
        };
        let reference = match state.references.get(&any_rows) {
            Some(reference) => reference.clone(),
            None => {
                let reference_name = format!(
                    "{}, row-invariant reference",
                    name::<T>(any_rows.dims, key.residual)
                );
                let reference = match state.choices.get(&reference_name) {
                    Some(choice) => Reference {
                        choice: choice.clone(),
                        splits: choice.algorithm.splits(self.lt),
                    },
                    None if tuner.stream.is_capturing() => return Err(not_prepared()),
                    None => {
                        let shape = [key.dims.n, key.dims.k];
                        let reference = tuner.invariant_reference::<T>(shape, key.residual, w)?;
                        self.file.add(&reference_name, &reference.choice);
                        reference
                    }
                };
                state.references.insert(any_rows, reference.clone());
                reference
            }
        };
        // Choices of other references, made when this one's was lost, are not mistaken for its own.
        let class_name = format!(
            "{}, row-invariant in {} splits",
            name::<T>(class, key.residual),
            reference.splits
        );
        if let Some(choice) = state.choices.get(&class_name).filter(|choice| accepts(choice)) {
            return Ok(choice.clone());
        }
        if tuner.stream.is_capturing() {
            return Err(not_prepared());
        }
        let of_class = Product::new(self.lt, [class.m, class.n, class.k], T::CODE, class_name.clone())?;
        let choice = tuner.choose_invariant::<T>(&of_class, class, key.residual, w, &reference)?;
        if choice.microseconds > 0.0 {
            self.file.add(&class_name, &choice);
        }
        state.choices.insert(class_name, choice.clone());
        [choice, reference.choice]
            .into_iter()
            .find(accepts)
            .ok_or_else(|| Error::Blas {
                call: "cublasLtMatmulAlgoCheck",
                shape: name::<T>(key.dims, key.residual),
                status: "no algorithm with the reference's bits takes this shape".to_string(),
            })
    }
}

/// A product whose algorithm is asked for.
#[derive(Clone, Copy)]
struct Asked<'a> {
    key: PlanKey,
    product: &'a Product,
    /// Its dimensions with the row count of its class.
    class: MatmulDims,
    w: DeviceSlice<'a, bf16>,
}
