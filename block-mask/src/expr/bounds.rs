//! Interval analysis: proves that no read of a captured buffer leaves it.

use std::ops::Range;

use super::{Axis, Bool, BoolNode, Float, FloatNode, Int, IntNode, IntOp};
use crate::error::{Error, Result};

/// The positions at which a function will be asked: what its buffer indices are checked against.
///
/// ```
/// use block_mask::MaskMod;
/// use block_mask::expr::Domain;
///
/// let domain = |batch| Domain { batch, heads: 1, q: 0..10, kv: 0..10 };
/// let padding = MaskMod::padding([7, 9]); // lengths of two batch rows
/// assert!(padding.check(&domain(2)).is_ok());
/// assert!(padding.check(&domain(3)).is_err(), "nobody knows the third length");
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Domain {
    /// Batch rows `0..batch`.
    pub batch: usize,
    /// Query heads `0..heads`.
    pub heads: usize,
    /// Query positions.
    pub q: Range<usize>,
    /// Key positions.
    pub kv: Range<usize>,
}

/// Inclusive bounds of a value.
type Interval = (i64, i64);

const WHOLE: Interval = (i32::MIN as i64, i32::MAX as i64);

impl Domain {
    /// Checks that positions fit into 32 bits.
    pub(crate) fn check(&self) -> Result<()> {
        let max = i32::MAX as usize;
        for (what, value) in [
            ("the batch size", self.batch),
            ("the number of heads", self.heads),
            ("the last query position", self.q.end),
            ("the last key position", self.kv.end),
        ] {
            if value > max {
                return Err(Error::TooLarge { what, value, max });
            }
        }
        Ok(())
    }

    fn is_empty(&self) -> bool {
        self.batch == 0 || self.heads == 0 || self.q.is_empty() || self.kv.is_empty()
    }

    fn axis(&self, axis: Axis) -> Interval {
        match axis {
            Axis::Batch => (0, self.batch as i64 - 1),
            Axis::Head => (0, self.heads as i64 - 1),
            Axis::Query => (self.q.start as i64, self.q.end as i64 - 1),
            Axis::Key => (self.kv.start as i64, self.kv.end as i64 - 1),
        }
    }
}

/// Checks every buffer read of a mask function.
pub(crate) fn check_bool(expr: &Bool, domain: &Domain) -> Result<()> {
    domain.check()?;
    if domain.is_empty() {
        Ok(())
    } else {
        boolean(expr, domain)
    }
}

/// Checks every buffer read of a score function.
pub(crate) fn check_float(expr: &Float, domain: &Domain) -> Result<()> {
    domain.check()?;
    if domain.is_empty() {
        Ok(())
    } else {
        float(expr, domain)
    }
}

fn wrap(low: i64, high: i64) -> Interval {
    // Arithmetic wraps, so an interval that leaves 32 bits says nothing.
    if low < WHOLE.0 || high > WHOLE.1 {
        WHOLE
    } else {
        (low, high)
    }
}

fn corners(x: Interval, y: Interval, f: impl Fn(i64, i64) -> i64) -> Interval {
    let all = [f(x.0, y.0), f(x.0, y.1), f(x.1, y.0), f(x.1, y.1)];
    let low = all.iter().copied().min().unwrap_or(0);
    let high = all.iter().copied().max().unwrap_or(0);
    wrap(low, high)
}

fn integer(expr: &Int, domain: &Domain) -> Result<Interval> {
    Ok(match expr.node() {
        IntNode::Const(value) => (*value as i64, *value as i64),
        IntNode::Axis(axis) => domain.axis(*axis),
        IntNode::Binary(op, x, y) => {
            let (x, y) = (integer(x, domain)?, integer(y, domain)?);
            match op {
                IntOp::Add => wrap(x.0 + y.0, x.1 + y.1),
                IntOp::Sub => wrap(x.0 - y.1, x.1 - y.0),
                IntOp::Mul => corners(x, y, |a, b| a * b),
                IntOp::Min => (x.0.min(y.0), x.1.min(y.1)),
                IntOp::Max => (x.0.max(y.0), x.1.max(y.1)),
                IntOp::Div if y.0 > 0 => corners(x, y, |a, b| a.div_euclid(b)),
                IntOp::Div => WHOLE,
                IntOp::Rem if y.0 > 0 && x.0 >= 0 => (0, x.1.min(y.1 - 1)),
                IntOp::Rem if y.0 > 0 => (0, y.1 - 1),
                IntOp::Rem => WHOLE,
            }
        }
        IntNode::Load(buffer, index) => {
            check_index("integer", buffer.values().len(), integer(index, domain)?)?;
            buffer
                .extent()
                .map_or((0, 0), |(low, high)| (low as i64, high as i64))
        }
        IntNode::Select(condition, x, y) => {
            boolean(condition, domain)?;
            let (x, y) = (integer(x, domain)?, integer(y, domain)?);
            (x.0.min(y.0), x.1.max(y.1))
        }
    })
}

fn float(expr: &Float, domain: &Domain) -> Result<()> {
    match expr.node() {
        FloatNode::Const(_) | FloatNode::Score => Ok(()),
        FloatNode::FromInt(x) => integer(x, domain).map(drop),
        FloatNode::Load(buffer, index) => {
            check_index("float", buffer.values().len(), integer(index, domain)?)
        }
        FloatNode::Binary(_, x, y) => float(x, domain).and_then(|()| float(y, domain)),
        FloatNode::Unary(_, x) => float(x, domain),
        FloatNode::Select(condition, x, y) => {
            boolean(condition, domain)?;
            float(x, domain)?;
            float(y, domain)
        }
    }
}

fn boolean(expr: &Bool, domain: &Domain) -> Result<()> {
    match expr.node() {
        BoolNode::Const(_) => Ok(()),
        BoolNode::CompareInt(_, x, y) => integer(x, domain).and_then(|_| integer(y, domain)).map(drop),
        BoolNode::CompareFloat(_, x, y) => float(x, domain).and_then(|()| float(y, domain)),
        BoolNode::And(x, y) | BoolNode::Or(x, y) => boolean(x, domain).and_then(|()| boolean(y, domain)),
        BoolNode::Not(x) => boolean(x, domain),
    }
}

fn check_index(kind: &'static str, len: usize, index: Interval) -> Result<()> {
    if index.0 < 0 || index.1 >= len as i64 {
        return Err(Error::IndexOutOfBounds {
            kind,
            len,
            lowest: index.0,
            highest: index.1,
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::expr::{IntBuffer, kv, q};

    fn domain(q_len: usize, kv_len: usize) -> Domain {
        Domain {
            batch: 2,
            heads: 4,
            q: 0..q_len,
            kv: 0..kv_len,
        }
    }

    #[test]
    fn an_index_that_may_leave_its_buffer_is_named() {
        let buffer = IntBuffer::new(vec![0; 10]);
        let ok = buffer.at(kv()).equals(0);
        assert_eq!(check_bool(&ok, &domain(5, 10)), Ok(()));
        assert_eq!(
            check_bool(&ok, &domain(5, 11)),
            Err(Error::IndexOutOfBounds {
                kind: "integer",
                len: 10,
                lowest: 0,
                highest: 10
            })
        );
        let negative = buffer.at(q() - kv()).equals(0);
        assert!(check_bool(&negative, &domain(5, 5)).is_err());
        let clamped = buffer.at((q() - kv()).clamp(0, 9)).equals(0);
        assert_eq!(check_bool(&clamped, &domain(500, 500)), Ok(()));
    }

    #[test]
    fn indices_read_from_a_buffer_are_bounded_by_its_values() {
        let document = IntBuffer::new(vec![0, 0, 1, 2]);
        let start = IntBuffer::new(vec![0, 2, 3]);
        let expr = kv().ge(start.at(document.at(q())));
        assert_eq!(check_bool(&expr, &domain(4, 4)), Ok(()));
        let short = IntBuffer::new(vec![0, 2]);
        assert!(check_bool(&kv().ge(short.at(document.at(q()))), &domain(4, 4)).is_err());
    }

    #[test]
    fn an_overflowing_index_is_refused() {
        let buffer = IntBuffer::new(vec![0; 10]);
        let expr = buffer.at((q() * i32::MAX).rem_floor(10)).equals(0);
        assert_eq!(
            check_bool(&expr, &domain(5, 5)),
            Ok(()),
            "a remainder bounds whatever wrapped"
        );
        assert!(check_bool(&buffer.at(q() * i32::MAX).equals(0), &domain(5, 5)).is_err());
    }

    #[test]
    fn an_empty_domain_reads_nothing() {
        let buffer = IntBuffer::new(vec![]);
        assert_eq!(check_bool(&buffer.at(kv()).equals(0), &domain(5, 0)), Ok(()));
    }
}
