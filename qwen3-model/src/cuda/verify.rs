//! Does a captured decode step do what the eager one does?

use cuda_graphs::{Graph, VerifyReport};

use super::inputs::SampledBy;
use super::{CudaBackend, DecodeRow};
use crate::{Error, Result};

impl CudaBackend {
    /// Runs the decode step of `rows` eagerly and as a replayed graph from the same state, and compares tokens,
    /// log-probabilities, positions, last tokens and logits bit for bit. Afterwards the step has been made once. Waits.
    ///
    /// # Errors
    /// [`cuda_graphs::Error::ReplayDiffers`] inside [`Error::Cuda`]; [`Error::Option`] without captured graphs; as
    /// [`decode`](Self::decode). Panics: none.
    pub fn verify_decode(&mut self, rows: &[DecodeRow]) -> Result<VerifyReport> {
        let bucket = self.set_decode_rows(rows)?;
        let Some(graphs) = self.graphs.take() else {
            let problem = "no graph is captured to compare with".into();
            return Err(Error::Option {
                option: "capture",
                problem,
            });
        };
        let compared = match graphs.graph(bucket) {
            Some(graph) => self.compare(graph, bucket),
            None => Err(Error::StepTooLarge {
                tokens: bucket,
                max: self.options.max_batch_size,
            }),
        };
        self.graphs = Some(graphs);
        self.decode.forget();
        compared
    }

    fn compare(&mut self, graph: &Graph, bucket: usize) -> Result<VerifyReport> {
        let stream = self.stream.clone();
        let before = self.decode_state(bucket)?;
        self.run_decode(bucket)?;
        let eager = self.decode_state(bucket)?;
        // Back to where the eager run began, with results that no run leaves.
        let [_, _, positions, last_token, _] = &before;
        stream.upload(self.decode.positions(bucket)?.cast::<u32>()?, positions)?;
        stream.upload(&self.last_token, last_token)?;
        stream.fill_bytes(self.sampled.words(), 0xff)?;
        stream.fill_bytes(&self.workspace.logits, 0xff)?;
        graph.launch(&stream)?;
        let replayed = self.decode_state(bucket)?;

        let mut report = VerifyReport {
            buffers: eager.len(),
            bytes: 0,
            changed: 0,
        };
        for (buffer, (eager, replayed)) in eager.iter().zip(&replayed).enumerate() {
            let differs = |i: &usize| eager[*i] != replayed[*i];
            let differing = (0..eager.len()).filter(differs).count();
            if let Some(first) = (0..eager.len()).find(differs) {
                let bytes = 4 * eager.len();
                let error = cuda_graphs::Error::ReplayDiffers {
                    buffer,
                    first: 4 * first,
                    differing: 4 * differing,
                    bytes,
                };
                return Err(error.into());
            }
            report.bytes += 4 * eager.len();
            report.changed += 4 * before[buffer]
                .iter()
                .zip(replayed)
                .filter(|(a, b)| a != b)
                .count();
        }
        Ok(report)
    }

    /// What a decode step of `bucket` rows changes but for the cache, as bits: tokens, log-probabilities, positions,
    /// last tokens, logits.
    fn decode_state(&self, bucket: usize) -> Result<[Vec<u32>; 5]> {
        let by = SampledBy::Decode;
        let logits = self.workspace.logits.slice(..bucket * self.config.vocab_size)?;
        Ok([
            self.stream.download(self.sampled.tokens(by, bucket)?)?,
            self.stream
                .download(self.sampled.logprobs(by, bucket)?.cast::<u32>()?)?,
            self.stream
                .download(self.decode.positions(bucket)?.cast::<u32>()?)?,
            self.stream.download(&self.last_token)?,
            self.stream.download(logits.cast::<u32>()?)?,
        ])
    }
}
